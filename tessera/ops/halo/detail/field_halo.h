#pragma once
// What operators share whose shard of a result needs more of a field than this rank's shard: the
// box that each rank needs, the order of work, and the exchange with its adjoint.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// The inputs that an interval of results reads in windowed dim `i`.
using InputsOf = std::function<Interval(std::size_t i, const Interval& results)>;

/// The exchange that gives each rank the inputs of its shard of `result`: in the last `windowed`
/// dims what `inputs` says, in the others its own shard of `field`; nothing where it has no
/// results. Zeros beyond the array. Both specs have the same number of dims. Collective over the
/// mesh.
Halo halo_of_windows(const ShardSpec& field, const ShardSpec& result, std::size_t windowed,
                     InputsOf inputs);

/// True if what needs no halo is to be computed before the rest: as `order` says, under `automatic`
/// from `least` elements on.
bool interior_first(HaloPolicy::Order order, std::int64_t elements, std::int64_t least);

/// `t`, whose box is `own`, within zeros of the larger `box`; `t` itself if both are the same.
at::Tensor embedded(const at::Tensor& t, const Box& own, const Box& box);

/// halo.exchange() and halo.sum() as differentiable functions from local to local tensors; each is
/// the other's derivative. Collective, and so are their backwards.
at::Tensor gathered_halo(const at::Tensor& local, const Halo& halo);
at::Tensor summed_halo(const at::Tensor& gradient, const Halo& halo);

/// An operator from a field to a field whose last dims are windowed, prepared for this rank.
class FieldHalo {
 protected:
  /// As halo_of_windows().
  FieldHalo(ShardSpec x, const ShardSpec& y, std::size_t windowed, InputsOf inputs);
  /// The values of this rank's needed box, all of which have arrived.
  HaloValues arrived(const at::Tensor& x) const;
  /// The number of dims in front of the windowed ones.
  std::size_t lead() const { return out_.size() - windowed_; }

  ShardSpec x_;
  std::size_t windowed_;
  Box out_;  // this rank's shard of y
  Halo halo_;
};

}  // namespace tessera::detail
