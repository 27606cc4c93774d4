#pragma once
// PoolHalo: one pooling of a field that is sharded in space, prepared for this rank. It runs below
// autograd on local tensors; the dims before the spatial ones are samples and channels.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tessera/ops/halo/detail/field_halo.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// The window of one dim: inputs [begin, end) of the array that each output pools and, for averages
/// that count padding, their number with padding.
struct PoolDim {
  std::int64_t extent, outputs;
  Window window;  // regular pooling
  // output o pools [floor(o * extent / outputs), ceil((o + 1) * extent / outputs))
  bool adaptive = false;
  /// Without what is beyond the array. `out` is not empty.
  Interval inputs(Interval out) const;
  Interval inside(std::int64_t o) const;
  /// Number of inputs in a window; `padded`: of regular pooling without dilation with padding
  /// elements, but not beyond the padding.
  std::int64_t count(std::int64_t o, bool padded) const;
};

class PoolHalo : FieldHalo {
 public:
  /// `x`, `y`: specs of input and output without Partial axes, the spatial dims (the last ones)
  /// sharded by the same axes. Every rank of the mesh calls it.
  PoolHalo(ShardSpec x, const ShardSpec& y, const std::vector<PoolDim>& dims);

  /// The largest value in each window and its index in the global array, row-major over the spatial
  /// dims.
  std::pair<at::Tensor, at::Tensor> largest(const at::Tensor& x) const;
  at::Tensor largest_backward(const at::Tensor& gradient, const at::Tensor& indices,
                              const at::Tensor& x) const;
  /// Sums divided by `divisor`, or by the number of inputs in each window (with padding if
  /// `count_padding`).
  at::Tensor average(const at::Tensor& x, bool count_padding, std::int64_t divisor) const;
  at::Tensor average_backward(const at::Tensor& gradient, const at::Tensor& x, bool count_padding,
                              std::int64_t divisor) const;

 private:
  /// The number of elements by which each sum of regular windows is divided; 0: they differ.
  std::int64_t divisor(bool count_padding, std::int64_t given) const;
  at::Tensor divided(const at::Tensor& t, bool count_padding) const;

  std::vector<PoolDim> dims_;
};

}  // namespace tessera::detail
