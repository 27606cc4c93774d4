#pragma once
// Helpers shared by rules of views and of their gradients.

#include <algorithm>

#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail {

/// Sizes of the shards of a dim of which only indices start, start + step, ... (count of them) are
/// kept.
inline Partition kept(const Partition& parts, std::int64_t start, std::int64_t step,
                      std::int64_t count) {
  return with_boundaries(parts, [&](std::int64_t end) {
    return end <= start ? 0 : std::min(ceil_div(end - start, step), count);
  });
}

/// The rows of a dim of `extent` of which windows are taken every `step` rows and none overlaps:
/// each window's with it, and those behind the last one with that.
inline Partition rows_of_windows(const Partition& windows, std::int64_t step, std::int64_t extent) {
  return with_boundaries(
      windows, [&](std::int64_t end) { return end == windows.extent() ? extent : end * step; });
}

/// Where the slice start, start + step, ... begins in this rank's local, of which it has `length`
/// indices.
inline std::int64_t local_start(const ShardSpec& in, int d, std::int64_t start, std::int64_t step,
                                std::int64_t length) {
  const std::int64_t begin = in.local_offset()[d];
  if (start < begin) start += ceil_div(begin - start, step) * step;
  return length == 0 ? 0 : start - begin;
}

}  // namespace tessera::detail
