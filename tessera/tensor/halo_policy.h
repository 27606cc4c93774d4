#pragma once
// How operators whose windows reach into other ranks' parts (convolution, pooling, ...) order their
// work.

#include "tessera/comm/job/manager.h"

namespace tessera {

struct HaloPolicy {
  /// Forward and backward. `interior_first`: what needs no halo is computed while halos travel,
  /// then what the halo gives; where nothing is to be had without it, as `assemble`. `wait_first`:
  /// the same split, with nothing between start and wait: bit for bit the same result. `assemble`:
  /// the part and its halo are put together, then computed at once. `automatic`: interior_first
  /// where the split costs less than that copy. That is for convolutions where what the halo gives
  /// is a few products (ops/tap_sum.h), and else for parts from kInteriorElements elements on
  /// (bench/halo); neighbourhood attention has a number of its own (bench/neighborhood).
  enum class Order : unsigned char {
    automatic,
    interior_first,
    wait_first,
    assemble
  } order = Order::automatic;
  /// The two adjoints of a windowed operator. `exchange`: each rank gets the output gradients that
  /// its inputs touched; one exchange serves both the input's and the weight's gradient. `sum`:
  /// each rank gets its inputs' halo again, and the halo's gradients are summed back.
  enum class Backward : unsigned char { exchange, sum } backward = Backward::exchange;

  static constexpr std::int64_t kInteriorElements = 100000;
  bool operator==(const HaloPolicy&) const = default;
};

/// Of this manager's tensors, from the next call on. `backward` must be the same on all ranks;
/// `order` is each rank's own affair.
void set_halo_policy(const DistributedManager& manager, const HaloPolicy& policy);
HaloPolicy halo_policy(const DistributedManager& manager);

}  // namespace tessera
