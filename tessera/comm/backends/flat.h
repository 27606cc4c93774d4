#pragma once
// Tensors in plain row-major order, one-dimensional views of them, and counts of elements.

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/base/internal/vector.h"

namespace tessera::detail {

/// True for memory in plain row-major order without pending conjugation or negation.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

/// The tensor itself if it is in plain order, else a copy.
inline at::Tensor plain(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

/// A one-dimensional view. A tensor of one or no element counts as contiguous whatever its strides
/// say; as bytes it must have stride 1.
inline at::Tensor flat(const at::Tensor& plain) {
  return plain.dim() == 1 && plain.stride(0) == 1 ? plain : plain.as_strided({plain.numel()}, {1});
}
inline at::Tensor flat_bytes(const at::Tensor& plain) { return flat(plain).view(at::kByte); }

/// The elements of one row: of all dims after the first.
inline std::int64_t row_numel(const at::Tensor& tensor) {
  std::int64_t width = 1;
  for (std::int64_t d = 1; d < tensor.dim(); ++d) width *= tensor.size(d);
  return width;
}

inline std::vector<std::int64_t> numels(const std::vector<at::Tensor>& tensors) {
  return mapped(tensors, [](const at::Tensor& t) { return t.numel(); });
}

inline std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

inline bool all_equal(const std::vector<std::int64_t>& counts) {
  return std::ranges::all_of(counts, [&](std::int64_t n) { return n == counts.front(); });
}

inline std::vector<std::int64_t> times(std::vector<std::int64_t> counts, std::int64_t factor) {
  for (auto& n : counts) n *= factor;
  return counts;
}

/// `count` for the one of `ranks` that is `rank`, nothing for the others.
inline std::vector<std::int64_t> only_for(int rank, std::int64_t count, std::size_t ranks) {
  std::vector<std::int64_t> counts(ranks, 0);
  counts[rank] = count;
  return counts;
}

/// Where the part of each rank begins.
inline std::vector<std::int64_t> begins_of(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> begins(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::int64_t{0});
  return begins;
}

/// Views of consecutive stretches of a flat tensor, of `counts` elements each.
inline std::vector<at::Tensor> split_flat(const at::Tensor& tensor,
                                          const std::vector<std::int64_t>& counts) {
  std::vector<at::Tensor> parts;
  parts.reserve(counts.size());
  std::int64_t begin = 0;
  for (const auto count : counts) {
    parts.push_back(tensor.narrow(0, begin, count));
    begin += count;
  }
  return parts;
}

}  // namespace tessera::detail
