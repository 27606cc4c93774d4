#pragma once
// Whether the tests run under a sanitizer: it maps much memory, holds freed memory back, and makes
// errors of its own of signals.

namespace tessera::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace tessera::test
