#pragma once
// What an index that is out of range does.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>

#include <string>

namespace tessera::detail {

/// Throws IndexError if `sound`, a bool without dims, is false. On a device it is the device that
/// finds out, as in libtorch's own kernels: the host does not wait for it.
inline void require_index(const at::Tensor& sound, const std::string& what) {
  if (!sound.is_cpu()) return at::_assert_async(sound, what);
  TORCH_CHECK_INDEX(sound.item<bool>(), what);
}

/// As require_index(): all of `0 <= index < extent`.
inline void require_range(const at::Tensor& index, std::int64_t extent, const char* name) {
  if (index.numel() == 0) return;
  require_index(index.ge(0).logical_and(index.lt(extent)).all(),
                std::string(name) + ": an index is out of range");
}

}  // namespace tessera::detail
