#pragma once
// What the fuzz targets share. A parser takes whatever bytes come, or refuses them by an Error of
// the library: any other exception, a crash, an overflow and a leak are findings.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::fuzz {

template <class Parse>
int parses(Parse&& parse) {
  try {
    parse();
  } catch (const Error&) {
  }
  return 0;
}

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the program, which libFuzzer reports with the input, where a property does not hold.
inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace tessera::fuzz
