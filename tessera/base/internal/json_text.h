#pragma once
// JSON strings and arrays without a JSON library: json_text("a\"b") -> "\"a\\\"b\"",
// json_list(std::vector{1, 2}) -> "[1,2]".

#include <cstdint>
#include <cstdio>
#include <string>

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

/// A JSON array of what `text` makes of each item.
template <class Range, class Text>
std::string json_list(const Range& range, const Text& text) {
  std::string out = "[";
  for (const auto& item : range) {
    if (out.size() > 1) out += ',';
    out += text(item);
  }
  return out + ']';
}
template <class Range>
std::string json_list(const Range& numbers) {
  return json_list(numbers, [](std::int64_t n) { return std::to_string(n); });
}

}  // namespace tessera
