#pragma once
// FieldMap: a linear operator from one sharded field to another whose derivative is such an
// operator too. For operators above autograd whose backward must know how the input was sharded,
// which libtorch's own backward is not told. Derivatives of any order follow.

#include "tessera/base/pinned.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail {

class FieldMap : Pinned {
 public:
  /// `from`, `to`: specs of the input and of the result, without Partial axes. `strides`: those of
  /// the result, as plain libtorch would show them.
  FieldMap(ShardSpec from, ShardSpec to, Dims strides)
      : from(std::move(from)), to(std::move(to)), strides(std::move(strides)) {}
  virtual ~FieldMap() = default;

  /// Computes this rank's shard of the result, of to.local_shape(). Every rank of the mesh calls
  /// it; it runs below autograd.
  virtual at::Tensor run(const at::Tensor& local) const = 0;
  /// The operator that takes the gradient of the result to the gradient of the input.
  virtual std::shared_ptr<const FieldMap> derivative() const = 0;

  const ShardSpec from, to;
  const Dims strides;
};

/// Applies `map` to `field`, which is redistributed to `map->from` first if needed; subject to
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
