#pragma once
// Helpers shared by rules of views and of their gradients.

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

inline c10::IValue int_list(const std::vector<std::int64_t>& values) {
  return c10::IValue(c10::List<std::int64_t>(values));
}

inline std::vector<int> identity(int n) {
  std::vector<int> from(n);
  std::iota(from.begin(), from.end(), 0);
  return from;
}

/// Sizes of the shards of a dim of which only indices start, start + step, ... (count of them) are
/// kept.
inline Partition kept(const Partition& parts, std::int64_t start, std::int64_t step,
                      std::int64_t count) {
  std::vector<std::int64_t> sizes;
  // number of kept indices < end
  const auto below = [&](std::int64_t end) {
    return std::clamp<std::int64_t>((end - start + step - 1) / step, 0, count);
  };
  for (int i = 0; i < parts.parts(); ++i) {
    const Interval part = parts.interval(i);
    sizes.push_back(part.empty() ? 0
                                 : (part.end <= start ? 0 : below(part.end)) -
                                       (part.begin <= start ? 0 : below(part.begin)));
  }
  return Partition(std::span<const std::int64_t>(sizes));
}

/// The rows of a dim of `extent` of which windows are taken every `step` rows and none overlaps:
/// each window's with it, and those behind the last one with that.
inline Partition rows_of_windows(const Partition& windows, std::int64_t step, std::int64_t extent) {
  std::vector<std::int64_t> sizes;
  std::int64_t last = 0;
  for (int i = 0; i < windows.parts(); ++i) {
    const std::int64_t end = windows.interval(i).end;
    const std::int64_t boundary = end == windows.extent() ? extent : end * step;
    sizes.push_back(boundary - last);
    last = boundary;
  }
  return Partition(std::span<const std::int64_t>(sizes));
}

/// A slice of this rank's local: where it begins, and its length.
struct LocalSlice {
  std::int64_t start, length;
};
inline LocalSlice local_slice(const ShardSpec& in, int d, std::int64_t start, std::int64_t step,
                              std::int64_t length) {
  const std::int64_t begin = in.local_offset()[d];
  std::int64_t first = start;
  if (first < begin) first += (begin - first + step - 1) / step * step;
  return {length == 0 ? 0 : first - begin, length};
}

}  // namespace tessera::detail
