#pragma once
// Helpers shared by rules of operators that read and write by index. Indices refer to the global
// tensor.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail {

/// Labels of the index tensor's own dims: kIndex, kIndex + 1, ...
inline constexpr int kIndex = 100;

/// This rank's shard of a dim of the global tensor.
struct DimShard {
  std::int64_t begin, size, extent;

  /// Throws IndexError for an index out of range. `from_end`: the operator takes negative indices,
  /// which count from the end.
  void check(const at::Tensor& index, const char* op, bool from_end) const {
    if (index.numel() == 0) return;
    const bool ok =
        index.ge(from_end ? -extent : 0).logical_and(index.lt(extent)).all().item<bool>();
    TORCH_CHECK_INDEX(ok, op, ": an index is out of range for a dim of size ", extent);
  }
  // Makes negative indices, which count from the end, non-negative.
  at::Tensor global(const at::Tensor& index) const {
    return at::where(index.lt(0), index + extent, index);
  }
  at::Tensor mine(const at::Tensor& global_index) const {
    return global_index.ge(begin).logical_and(global_index.lt(begin + size));
  }
};

inline DimShard part_of(const ShardSpec& spec, int d) {
  return {spec.local_offset()[d], spec.local_shape()[d], spec.shape()[d]};
}

inline Labels except(int n, int d, int label) {
  Labels labels = all_labels(n);
  labels[d] = label;
  return labels;
}

/// True if values can be Partial: float8 and unsigned integers of 16 to 64 bits can be moved, but
/// libtorch does not add them.
inline bool has_sums(at::ScalarType type) {
  return !at::isFloat8Type(type) && !at::isBarebonesUnsignedType(type);
}

/// A summand of a rank that has nothing to give.
inline at::Tensor nothing_like(const at::Tensor& t, at::IntArrayRef sizes) {
  return t.new_full(sizes, no_summand(t.scalar_type()));
}

/// `picked` where `mine` is true (it has the shape of the index, at dim `at` of the result), a zero
/// that changes no sum elsewhere.
inline at::Tensor masked(const at::Tensor& picked, const at::Tensor& mine, std::int64_t at) {
  std::vector<std::int64_t> shape(picked.dim(), 1);
  for (std::int64_t i = 0; i < mine.dim(); ++i) shape[at + i] = mine.size(i);
  return picked.masked_fill(mine.logical_not().view(shape), no_summand(picked.scalar_type()));
}

/// The slices of `t` along dim d that `at`, an index of the global tensor, names: `shape`, in which
/// the index' dims are in place of d; zeros that change no sum where another rank has the slice.
inline at::Tensor slices_here(const at::Tensor& t, std::int64_t d, const at::Tensor& at,
                              const DimShard& part, at::IntArrayRef shape) {
  if (part.size == 0) return nothing_like(t, shape);
  const at::Tensor here = (at - part.begin).clamp(0, part.size - 1).reshape(-1);
  return masked(t.index_select(d, here).view(shape), part.mine(at), d);
}

/// Labels of the index' dims: dims in which the index is as large as the tensors may be sharded; in
/// the others, positions of index and tensor would be on different ranks.
inline Labels aligned_labels(const OpCall& call, int d) {
  const TensorInfo& index = *call.find("index");
  Labels labels = all_labels(index.spec.dims());
  for (int i = 0; i < index.spec.dims(); ++i) {
    for (const TensorInfo& t : call.tensors())
      if (i != d && t.spec.shape()[i] != index.spec.shape()[i]) labels[i] = kUnsharded;
  }
  return labels;
}

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
