#pragma once
// Names that go into files of a line each, and text of others that goes to a terminal.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/text.h"

namespace tessera {

/// `text` with every control character as \xNN, cut after `limit` bytes with "...".
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

/// Why this is no name that can stand in a file or a message: it is empty, longer than 1024 bytes,
/// or holds a blank or a control character, with which it would write words or lines of its own.
/// `spaces`: plain spaces are taken, for names that stand in messages alone. Bytes above 0x7f
/// (UTF-8) are fine.
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
