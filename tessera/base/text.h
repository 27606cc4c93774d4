#pragma once
// Text for messages and files, the same whatever locale the process has set:
// concat("rank ", 3, " of ", 4) -> "rank 3 of 4", list({1, 2}) -> "[1, 2]", joined({1, 2}, "-") ->
// "1-2".

#include <functional>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// An output string stream with the classic locale. A plain std::ostringstream takes the process'
/// global one, which may write 12345 as "12.345".
class TextStream : public std::ostringstream {
 public:
  TextStream() { imbue(std::locale::classic()); }
};

/// An input string stream with the classic locale.
class TextReader : public std::istringstream {
 public:
  explicit TextReader(const std::string& text) : std::istringstream(text) {
    imbue(std::locale::classic());
  }
};

/// The arguments streamed one after the other, as text.
template <class... Args>
std::string concat(const Args&... args) {
  TextStream out;
  (out << ... << args);
  return std::move(out).str();
}

/// The items with `separator` between them; of each one what `text_of`, a function or a member,
/// gives.
template <class Range, class TextOf = std::identity>
std::string joined(const Range& range, std::string_view separator, const TextOf& text_of = {}) {
  TextStream out;
  bool first = true;
  for (const auto& item : range) {
    if (!std::exchange(first, false)) out << separator;
    out << std::invoke(text_of, item);
  }
  return std::move(out).str();
}

/// "[a, b, c]"; beyond `limit` items it ends with "... (N in all)".
template <class Range>
std::string list(const Range& range, std::size_t limit = 32) {
  TextStream out;
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

/// The text with the markup of SVG and HTML escaped, "a < b" as "a &lt; b", for contents and
/// attributes; control characters are dropped. UTF-8 in, UTF-8 out.
inline std::string markup_text(const std::string& text) {
  static constexpr std::string_view marks = "&<>\"";
  static constexpr const char* names[] = {"&amp;", "&lt;", "&gt;", "&quot;"};
  std::string out;
  for (const char c : text) {
    if (const auto mark = marks.find(c); mark != marks.npos)
      out += names[mark];
    else if (static_cast<unsigned char>(c) >= 32)
      out += c;
  }
  return out;
}

}  // namespace tessera
