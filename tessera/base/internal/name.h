#pragma once
// Checks of names that are written to line-based files, and text that is safe to print.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/text.h"

namespace tessera {

/// `text` with control characters in hexadecimal, truncated after `limit` bytes with "...".
inline std::string printable(std::string_view text, std::size_t limit = 200) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string shown;
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f)
      shown += c;
    else
      shown.append("\\x").append(1, digits[byte >> 4]).append(1, digits[byte & 15]);
  }
  if (text.size() > limit) shown += concat("... (", text.size(), " bytes in all)");
  return shown;
}

/// "layer.weight" for a name within a path of names; the name alone where the path is empty.
inline std::string dotted(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + '.' + name;
}

/// Says why a name cannot be used in a file or a message; nullopt if it can. Names that are empty,
/// longer than 1024 bytes, or hold a blank or a control character are refused: they would write
/// words or lines of their own. `spaces`: plain spaces are allowed, for names that are used in
/// messages alone. Bytes above 0x7f (UTF-8) are fine.
inline std::optional<std::string> name_fault(std::string_view name, bool spaces = false) {
  if (name.empty()) return "is empty";
  if (name.size() > 1024) return concat("has ", name.size(), " bytes; at most 1024 are taken");
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (byte == 0x20 && !spaces))
      return concat("holds a blank or a control character (byte ", static_cast<int>(byte), ")");
  }
  return std::nullopt;
}

}  // namespace tessera
