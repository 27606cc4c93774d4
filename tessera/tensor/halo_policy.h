#pragma once
// HaloPolicy: how operators whose windows reach into other ranks' shards (convolution, pooling,
// ...) order their work.

#include "tessera/comm/job/manager.h"

namespace tessera {

struct HaloPolicy {
  /// Order of forward and backward. `interior_first`: what needs no halo is computed while halos
  /// travel, then the rest; if nothing can be computed without halo, as `assemble`. `wait_first`:
  /// the same split with a wait right after the start; its result is bitwise the same. `assemble`:
  /// shard and halo are copied together, then computed at once. `automatic`: interior_first where
  /// the split costs less than that copy. That is the case for convolutions whose halo takes few
  /// multiplications (ops/spatial/tap_sum.h), and otherwise for shards from kInteriorElements
  /// elements on (bench/halo); neighbourhood attention has a threshold of its own
  /// (bench/neighborhood).
  enum class Order : unsigned char {
    automatic,
    interior_first,
    wait_first,
    assemble
  } order = Order::automatic;
  /// The two adjoints of a windowed operator. `exchange`: each rank gets the output gradients that
  /// its inputs contribute to; one exchange serves both the input's and the weight's gradient.
  /// `sum`: each rank gets its inputs' halo again, and the halo's gradients are summed back.
  enum class Backward : unsigned char { exchange, sum } backward = Backward::exchange;

  static constexpr std::int64_t kInteriorElements = 100000;
  bool operator==(const HaloPolicy&) const = default;
};

/// Sets the policy of this manager's tensors, from the next call on. `backward` must be the same on
/// all ranks; `order` may differ.
void set_halo_policy(const DistributedManager& manager, const HaloPolicy& policy);
HaloPolicy halo_policy(const DistributedManager& manager);

}  // namespace tessera
