#pragma once
// JSON strings and arrays without a JSON library: json_text("a\"b") -> "\"a\\\"b\"",
// json_list(std::vector{1, 2}) -> "[1,2]".

#include <cstdio>
#include <functional>
#include <string>

#include "tessera/base/text.h"

namespace tessera {

/// The text as a JSON string, quotes included. Bytes above 0x7f are unchanged: UTF-8 in, UTF-8 out.
inline std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x",
                    static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// A JSON array of what `text` makes of each item, numbers by default.
template <class Range, class Text = std::identity>
std::string json_list(const Range& range, const Text& text = {}) {
  return '[' + joined(range, ",", text) + ']';
}

}  // namespace tessera
