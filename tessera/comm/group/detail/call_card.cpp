#include "tessera/comm/group/detail/call_card.h"

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

std::uint64_t CallSource::hash() const {
  // The names of an operator's calls follow from it.
  if (origin) return origin->hash();
  return name.empty() ? 0 : Hash().text(name).value();
}

std::string CallSource::text() const {
  return origin ? concat(", for ", origin->text()) : std::string();
}

std::uint64_t CallCard::hash() const {
  if (*operation == '\0') return 0;
  Hash hash;
  hash.text(operation);
  hash.number(static_cast<std::uint64_t>(dtype) | static_cast<std::uint64_t>(device) << 8 |
              static_cast<std::uint64_t>(op + 1) << 16 |
              static_cast<std::uint64_t>(root + 1) << 32);
  hash.number(static_cast<std::uint64_t>(elements));
  if (const auto asked = source.hash()) hash.number(asked);
  for (const auto size : sizes) hash.number(static_cast<std::uint64_t>(size));
  return hash.value();
}

std::string CallCard::text() const {
  std::string text = operation;
  if (!source.name.empty()) text += concat(" '", source.name, "'");
  if (op >= 0) text += concat(", ", to_string(static_cast<ReduceOp::Kind>(op)));
  if (dtype != c10::ScalarType::Undefined) text += concat(", ", c10::toString(dtype));
  if (elements >= 0)
    text += sizes.empty() ? concat(", ", elements, " elements")
                          : concat(", rows of ", elements, " elements, sizes ", list(sizes));
  if (root >= 0) text += concat(", root ", root);
  if (device != c10::DeviceType::CPU) text += concat(" on ", c10::DeviceTypeName(device));
  return text + source.text();
}

std::uint64_t MessageCard::hash() const {
  return Hash()
      .number(static_cast<std::uint64_t>(dtype))
      .number(static_cast<std::uint64_t>(elements))
      .number(call)
      .value();
}

int MessageCard::tag() const {
  constexpr int kOurs = 1 << 30, kOfCall = 1 << 29;
  return kOurs | (of_call ? kOfCall : 0) | static_cast<int>((number & 0xff) << 21) |
         static_cast<int>(hash() & 0x1fffff);
}

std::string MessageCard::text() const {
  return concat(c10::toString(dtype), ", ", elements, " elements");
}

std::string mismatch_text(const std::vector<RankCall>& calls, MismatchAt at,
                          const std::string& more) {
  const std::string text = joined(
      calls, "; ", [](const RankCall& call) { return concat("rank ", call.rank, ' ', call.what); });
  return concat("the ranks called different things: ", text, more,
                at == MismatchAt::before_data
                    ? ". No data was moved; make every rank call the same, in the same order"
                    : ". A call under way cannot be taken back, so the group has ended. Make the "
                      "ranks agree (CheckLevel::collective tells before data moves, and the group "
                      "goes on)");
}

}  // namespace tessera::detail
