#pragma once
// FieldMap: a linear operator from one sharded field to another, with its derivatives. For
// operators above autograd whose backward must know how the input was sharded, which libtorch's own
// backward is not told. Derivatives of any order follow.

#include <functional>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail {

struct FieldMap {
  /// Takes this rank's shard of one field to its shard of the other, of the local_shape() of that
  /// one's spec. Every rank of the mesh calls it; it runs below autograd.
  using Function = std::function<at::Tensor(const at::Tensor& local)>;

  /// Specs of the input and of the result, without Partial axes.
  ShardSpec x, y;
  /// Their strides where they are what an operator returns, as plain libtorch would show them.
  Dims x_strides, y_strides;
  /// The operator.
  Function forward;
  /// Takes the gradient of the result to the gradient of the input.
  Function backward;
  /// The derivative of `backward`, from x to y; empty: `forward`.
  Function forward_again = {};
};

/// Applies `map` to `field`, which is redistributed to `map->x` first if needed; subject to
/// Policies::redistribution, under the operator's `name`. Differentiable.
at::Tensor apply(const char* name, const at::Tensor& field,
                 const std::shared_ptr<const FieldMap>& map);
/// Redistributes `field`, the operator's `argument`, to `to` if needed; subject to
/// Policies::redistribution.
at::Tensor laid_out(const char* name, const char* argument, const at::Tensor& field,
                    const ShardSpec& to);

/// The strides of a result of `shape` whose memory format, channels_last or row-major, is that of
/// `like`.
Dims suggested_strides(const at::Tensor& like, const std::vector<std::int64_t>& shape);

}  // namespace tessera::detail
