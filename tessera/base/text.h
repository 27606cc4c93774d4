#pragma once
// Text for messages: concat("rank ", 3, " of ", 4), list({1, 2}) -> "[1, 2]".

#include <sstream>
#include <string>

namespace tessera {

/// The arguments, streamed one after the other.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

/// "[a, b, c]", cut after `limit` items with "... (N in all)".
template <class Range>
std::string list(const Range& range, std::size_t limit = 32) {
  std::ostringstream out;
  std::size_t n = 0;
  out << '[';
  for (const auto& item : range) {
    if (n < limit) out << (n ? ", " : "") << item;
    ++n;
  }
  if (n > limit) out << ", ... (" << n << " in all)";
  out << ']';
  return std::move(out).str();
}

}  // namespace tessera
