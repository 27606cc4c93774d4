#include "tessera/comm/group/agreement.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/store_meeting.h"

namespace tessera {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  TextReader in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

std::string hash_bytes(std::uint64_t value) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

/// The ranks' texts, or an empty list if all are equal. Goes through the store if the group has no
/// other connection (ManagerState::meeting_place()), else through the group's own calls.
std::vector<std::string> texts_that_differ(const Group& group, const std::string& text) {
  constexpr auto kCall = "agreement";
  const std::uint64_t value = Hash().text(text).value();
  detail::GroupState& state = *group.state();
  if (state.meets_at_store() && state.size() > 1) {
    const auto sequence = state.next_sequence();
    state.watch().require_healthy(kCall, sequence);
    state.watch().begin(sequence, kCall);
    try {
      const auto key = concat(kCall, " ", sequence);
      if (detail::agree_at_store(*state.store(), key, state.size(), value, state.timeout()))
        return {};
      return detail::gather_at_store(*state.store(), key, state.rank(), state.size(), text,
                                     state.timeout());
    } catch (...) {
      state.watch().fail(kCall, sequence, std::current_exception(), state.timeout());
    }
  }
  const CallOptions options{.name = kCall};
  const auto hashes = group.all_gather_bytes(hash_bytes(value), options);
  if (std::all_of(hashes.begin(), hashes.end(),
                  [&](const std::string& h) { return h == hashes.front(); }))
    return {};
  // all ranks take this branch together, since all hold the same hashes
  return group.all_gather_bytes(text, options);
}

}  // namespace

void require_agreement(const Group& group, const std::string& subject, const std::string& text) {
  const auto texts = texts_that_differ(group, text);
  if (texts.empty()) return;
  const auto second = static_cast<std::size_t>(
      std::find_if(texts.begin(), texts.end(),
                   [&](const std::string& t) { return t != texts.front(); }) -
      texts.begin());
  const auto a = lines_of(texts.front()), b = lines_of(texts[second]);
  std::size_t line = 0;
  while (line < a.size() && line < b.size() && a[line] == b[line]) ++line;
  auto shown = [line](const std::vector<std::string>& lines) {
    return line < lines.size() ? concat('"', lines[line], '"') : std::string("nothing");
  };
  std::vector<int> with_first, with_other;
  for (std::size_t r = 0; r < texts.size(); ++r)
    (texts[r] == texts.front() ? with_first : with_other).push_back(group.ranks()[r]);
  throw MismatchError(concat("group '", group.name(), "': the ranks disagree about ", subject,
                             ". First difference, line ", line + 1, ": ranks ", list(with_first),
                             " have ", shown(a), ", rank ", group.ranks()[second], " has ",
                             shown(b), " (ranks that differ from the first: ", list(with_other),
                             "). Give every rank the same."));
}

}  // namespace tessera
