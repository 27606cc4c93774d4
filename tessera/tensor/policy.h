#pragma once
// Policies: what happens if an operator would do more than its user wrote.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/job/manager.h"

namespace tessera {

/// What to do about an implicit action: allow it, warn about it (once for each operator,
/// combination of placements and place in the program that calls it), or throw.
enum class Policy : unsigned char { allow, warn, error };

struct Policies {
  /// Applies to operators that gather or move shards between ranks by themselves. Reducing a
  /// Partial value is what its placement asks for, and always allowed.
  Policy redistribution = Policy::warn;
  /// Applies to plain tensors that are given to an operator together with sharded ones: they are
  /// taken as replicated, that is, equal on all ranks.
  Policy promotion = Policy::allow;
  /// Applies to such plain tensors whose values differ by rank. Unless it is `allow`, the first one
  /// of each shape and dtype that an operator is given is compared over the ranks of the mesh, by
  /// one small call; CheckLevel::collective compares every one. `warn` compares at most a thousand
  /// on each mesh, and the mesh's first rank warns; `error` throws MismatchError on all ranks.
  Policy plain_values = Policy::warn;
};

/// Sets the policies of this manager's sharded tensors. All ranks must set the same.
void set_policies(const DistributedManager& manager, const Policies& policies);
Policies policies(const DistributedManager& manager);

/// Restarts the random numbers of this manager's sharded tensors from `seed`, which must be the
/// same on all ranks.
void manual_seed(const DistributedManager& manager, std::uint64_t seed);

/// The state of the random numbers of sharded tensors: equal states draw equal numbers. To draw the
/// same again (recomputing a forward, resuming a run) read the state before and set it after; all
/// ranks must do the same.
struct RandomState {
  std::uint64_t seed = 0;
  /// Number of the next draw.
  std::uint64_t stream = 0;
  bool operator==(const RandomState&) const = default;
};
RandomState random_state(const DistributedManager& manager);
void set_random_state(const DistributedManager& manager, const RandomState& state);

/// How operators whose windows reach into other ranks' shards (convolution, pooling, ...) order
/// their work.
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

// RefusalScope: finds every operator of a program that refuses its placements, not only the first
// one.
//
//   tessera::RefusalScope scope(manager);
//   net->forward(x);
//   for (const auto& r : scope.refusals()) std::cout << r.op << ": " << r.why << "\n";

struct Refusal {
  /// Name of the operator: "aten::some_operator".
  std::string op;
  /// The text of the error that it would have thrown.
  std::string why;
};

namespace detail {
struct RankState;
}  // namespace detail

/// While it lives, an operator on this manager's sharded tensors that has no rule for its arguments
/// is recorded and runs on gathered values. Operators that write to their arguments or draw random
/// numbers throw as usual. All ranks must open and close scopes alike. For examining programs, not
/// for running them: plans of refused operators are not kept, and each call gathers again.
class RefusalScope : Pinned {
 public:
  explicit RefusalScope(const DistributedManager& manager);
  ~RefusalScope();

  /// The refusals so far, in order, those of backward included.
  std::vector<Refusal> refusals() const;

 private:
  std::shared_ptr<detail::RankState> state_;
  std::shared_ptr<std::vector<Refusal>> notes_, before_;
};

}  // namespace tessera
