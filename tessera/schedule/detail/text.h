#pragma once
// Reading of schedules, character by character.

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::detail {

/// The decimal number at `at`, which moves behind it. Throws ScheduleSyntaxError where there is
/// none, where it has leading zeros, and where it is above `largest`; the first character is in
/// `column`.
int read_number(std::string_view text, std::size_t& at, int largest, const char* what, int line,
                int column);

/// What an error shows of the text at a place: "\"x,3B0\"" or "the end".
std::string found(std::string_view text, std::size_t at);

}  // namespace tessera::detail
