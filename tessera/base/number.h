#pragma once
// Numbers as text and back, the same whatever locale the process has set. Text must be a number to
// its very end: parse_number("0042") -> 42, parse_real("1.5e3") -> 1500, parse_real("1.5x") ->
// nullopt, fixed(2.25, 1) -> "2.2".

#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace tessera {

/// A whole number of decimal digits only: no sign, no blanks, leading zeros allowed. Returns
/// nullopt for other text and for numbers above 2^64 - 1.
inline std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// A finite decimal number with an optional sign in front: "3", "-.5", "2.", "1e-3". Returns
/// nullopt for other text, blanks, "inf" and "nan", and for numbers that a double cannot hold.
inline std::optional<double> parse_real(std::string_view text) {
  if (!text.empty() && text.front() == '+') {
    text.remove_prefix(1);
    if (!text.empty() && text.front() == '-') return std::nullopt;
  }
  // Letters would be "inf" and "nan", which from_chars takes.
  if (text.find_first_not_of("0123456789+-.eE") != std::string_view::npos) return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// A double in its exact form, as saved states have it: sign, hexadecimal digits, binary exponent,
/// as std::hexfloat writes it ("-0x1.8p+1"). Returns nullopt for other text.
inline std::optional<double> parse_hex_real(std::string_view text) {
  const bool negative = !text.empty() && text.front() == '-';
  if (negative) text.remove_prefix(1);
  if (text.substr(0, 2) != "0x") return std::nullopt;
  text.remove_prefix(2);
  // Without its exponent it was truncated.
  if (text.empty() || text.front() == '-' || text.find('p') == text.npos) return std::nullopt;
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::hex);
  // Finite: from_chars takes "inf" and "nan" too.
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    return std::nullopt;
  return negative ? -value : value;
}

/// `value` with `digits` decimals, as printf's "%.*f" writes it in the classic locale.
inline std::string fixed(double value, int digits) {
  char text[400];
  const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, digits);
  return {text, end.ptr};
}

/// `value` with `digits` significant digits, as printf's "%.*g" writes it in the classic locale.
inline std::string significant(double value, int digits) {
  char text[400];
  const auto end =
      std::to_chars(text, text + sizeof text, value, std::chars_format::general, digits);
  return {text, end.ptr};
}

/// The three functions below know ASCII alone.
inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
inline char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace tessera
