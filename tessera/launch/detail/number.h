#pragma once
// Decimal numbers as launchers write them.

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera::detail {

/// Digits only, no sign, no blanks, leading zeros allowed; nothing for other text and above 2^64 -
/// 1.
inline std::optional<std::uint64_t> parse_number(std::string_view text) {
  if (text.empty()) return std::nullopt;
  std::uint64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (value > (UINT64_MAX - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  return value;
}

}  // namespace tessera::detail
