#pragma once
// Text inside SVG and HTML: markup_text("a < b") -> "a &lt; b".

#include <string>

namespace tessera {

/// The text with markup characters escaped, for contents and attributes; control characters are
/// dropped. UTF-8 in, UTF-8 out.
inline std::string markup_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (static_cast<unsigned char>(c) >= 32) {
      out += c;
    }
  }
  return out;
}

}  // namespace tessera
