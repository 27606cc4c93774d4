#include "tessera/shm/types.h"

namespace tessera::shm {
namespace {

struct ElementFacts {
  const char* name;
  std::size_t bytes;
};
/// In the order of Element.
constexpr ElementFacts kElements[] = {
    {"bool", 1},     {"int8", 1},    {"uint8", 1},   {"int16", 2},     {"uint16", 2},
    {"int32", 4},    {"uint32", 4},  {"int64", 8},   {"uint64", 8},    {"half", 2},
    {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"complex64", 8}, {"complex128", 16}};

}  // namespace

std::size_t size_of(Element element) {
  const auto i = static_cast<std::size_t>(element);
  if (i >= std::size(kElements)) throw InvalidArgument("shm: no such element type");
  return kElements[i].bytes;
}

const char* to_string(Element element) {
  const auto i = static_cast<std::size_t>(element);
  return i < std::size(kElements) ? kElements[i].name : "?";
}

const char* to_string(Reduction::Kind kind) {
  static constexpr const char* kNames[] = {"sum",           "product", "min", "max", "average",
                                           "premultiplied", "and",     "or",  "xor"};
  const auto i = static_cast<std::size_t>(kind);
  return i < std::size(kNames) ? kNames[i] : "?";
}

const char* to_string(Cause cause) {
  static constexpr const char* kNames[] = {"other host",    "other user",     "no memory",
                                           "not permitted", "too many ranks", "disagreement",
                                           "absent"};
  const auto i = static_cast<std::size_t>(cause);
  return i < std::size(kNames) ? kNames[i] : "?";
}

const char* to_string(Stores stores) {
  static constexpr const char* kNames[] = {"written through the cache",
                                           "written through the cache, lines are handed over",
                                           "written past the cache"};
  const auto i = static_cast<std::size_t>(stores);
  return i < std::size(kNames) ? kNames[i] : "?";
}

bool reduces(Element element, Reduction::Kind kind) {
  using Kind = Reduction::Kind;
  const bool integer = element <= Element::uint64, complex = element >= Element::complex64;
  if (kind == Kind::sum || kind == Kind::product) return true;
  if (kind == Kind::min || kind == Kind::max) return !complex;
  if (kind == Kind::average || kind == Kind::premultiplied) return !integer;
  return integer && kind <= Kind::bit_xor;
}

}  // namespace tessera::shm
