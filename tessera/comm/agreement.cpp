#include "tessera/comm/agreement.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

std::string hash_bytes(const std::string& text) {
  const std::uint64_t value = Hash().text(text).value();
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

}  // namespace

void require_agreement(const Group& group, const std::string& subject, const std::string& text) {
  const CallOptions options{.name = "agreement"};
  const auto hashes = group.all_gather_bytes(hash_bytes(text), options);
  const auto other = std::find_if(hashes.begin(), hashes.end(), [&](const std::string& h) { return h != hashes.front(); });
  if (other == hashes.end()) return;

  // All ranks take this branch together, since all hold the same hashes.
  const auto texts = group.all_gather_bytes(text, options);
  const auto second = static_cast<std::size_t>(other - hashes.begin());
  const auto a = lines_of(texts.front()), b = lines_of(texts[second]);
  std::size_t line = 0;
  while (line < a.size() && line < b.size() && a[line] == b[line]) ++line;
  auto shown = [line](const std::vector<std::string>& lines) { return line < lines.size() ? concat('"', lines[line], '"') : std::string("nothing"); };
  std::vector<int> with_first, with_other;
  for (std::size_t r = 0; r < hashes.size(); ++r) (hashes[r] == hashes.front() ? with_first : with_other).push_back(group.ranks()[r]);
  throw MismatchError(concat("group '", group.name(), "': the ranks disagree about ", subject, ". First difference, line ", line + 1, ": ranks ",
                             list(with_first), " have ", shown(a), ", rank ", group.ranks()[second], " has ", shown(b),
                             " (ranks that differ from the first: ", list(with_other), "). Give every rank the same."));
}

}  // namespace tessera
