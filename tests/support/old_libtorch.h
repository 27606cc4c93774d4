#pragma once
// Whether the tests run with a libtorch older than the one that the figures and tables are for.

#include <torch/headeronly/version.h>

namespace tessera::test {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
inline constexpr bool kOldLibtorch = true;
#else
inline constexpr bool kOldLibtorch = false;
#endif

}  // namespace tessera::test
