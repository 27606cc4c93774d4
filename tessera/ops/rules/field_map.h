#pragma once
// Linear operators between fields whose derivatives are such operators too: the halo of one
// direction is summed back by the other, and the parts of the input, which an operator's own
// backward is not told, are known. For operators above autograd; first and higher derivatives
// follow.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

class FieldMap {
 public:
  /// Specs without partial axes; `strides`: the result's as plain libtorch would show them.
  FieldMap(ShardSpec from, ShardSpec to, Dims strides)
      : from(std::move(from)), to(std::move(to)), strides(std::move(strides)) {}
  FieldMap(const FieldMap&) = delete;
  FieldMap& operator=(const FieldMap&) = delete;
  virtual ~FieldMap() = default;

  /// This rank's part of the result, of to.local_shape(). Collective over the mesh; below autograd.
  virtual at::Tensor run(const at::Tensor& local) const = 0;
  /// Takes the result's gradient to the input's.
  virtual std::shared_ptr<const FieldMap> derivative() const = 0;

  const ShardSpec from, to;
  const Dims strides;
};

/// The operator `name` of a sharded tensor, which is first laid out as `map->from`: if that moves
/// shards, by Policies::redistribution. Differentiable.
at::Tensor apply(const char* name, const at::Tensor& field,
                 const std::shared_ptr<const FieldMap>& map);
/// Laid out as `to`, if need be, with the policy's word.
at::Tensor laid_out(const char* name, const char* argument, const at::Tensor& field,
                    const ShardSpec& to);

/// Strides of a result of this shape that takes its memory format from `like`: channels_last or
/// row-major.
Dims suggested_strides(const at::Tensor& like, const std::vector<std::int64_t>& shape);

}  // namespace tessera::detail
