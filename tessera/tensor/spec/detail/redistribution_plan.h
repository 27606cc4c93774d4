#pragma once
// RedistributionPlan: how a tensor gets from one spec of a mesh to another, as boxes of global
// indices; no tensors and no communication here.
//
// A plan has at most three stages, and moves the fewest elements that the specs allow:
//   reduce   Partial axes that end: one all-reduce if all ranks of the axes need the same, else one
//            reduce-scatter over all of them to the boxes that the target needs (or, if the target
//            needs them on other ranks, to even boxes, which then move once).
//   move     One call over the axes whose sharding changes: all-gather (a broadcast if one rank
//            holds everything), all-to-all, or messages.
//   finish   Axes that become Partial: what a rank does not hold is the reduction's identity. No
//            communication: a shard becomes its rank's summand by padding it with zeros.
// Among calls that move the same, the one with the fewest rounds is used (all-gather: log2 p;
// all-to-all: p - 1; messages: as many as a rank has peers). Everything that all ranks must agree
// on follows from the specs alone.

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group/types.h"
#include "tessera/partition/transfer.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

class CallOrigin;

struct RedistributionPlan {
  /// The value in `whole` is reduced over a group. Without `pieces` every rank gets all of it;
  /// otherwise rank r of the group gets pieces[r].
  struct Reduction {
    std::vector<int> axes;
    ReduceOp::Kind op;
    Box whole;
    std::vector<Box> pieces;
    int ranks = 1, rank = 0;  // of the group
  };
  struct Move {
    enum class Kind : unsigned char { none, all_gather, broadcast, all_to_all, exchange };
    Kind kind = Kind::none;
    std::vector<int> axes;    // of the group
    Box after;                // what this rank holds after the move
    std::vector<Box> pieces;  // all_gather, broadcast: of each rank of the group
    int rank = 0;             // of this rank in the group
    int root = -1;            // broadcast
    TransferPlan transfer;    // all_to_all, exchange: ranks are those of the group
  };

  Box before;  // this rank's box under the source
  std::vector<Reduction> reductions;
  Move move;
  Box target;  // this rank's box under the target
  // `move.after` is a part of `target`; the rest is filled with the identity
  bool pad = false;
  // all of this rank's box is the identity: another rank of the axis holds the value
  bool clear = false;
  ReduceOp::Kind identity = ReduceOp::Kind::sum;  // of this reduction
  std::int64_t scale = 1;  // for a mean: the number of ranks, since all but one hold zeros
  // Of a redistribution that no operator asks for.
  std::shared_ptr<const CallOrigin> origin;

  /// Number of elements that this rank receives in a reduction, which counts as a reduce-scatter,
  /// or as one and an all-gather.
  static std::int64_t received(const Reduction& reduction);
  /// Number of elements that it receives in the move.
  std::int64_t moved() const;
};

RedistributionPlan make_redistribution_plan(const ShardSpec& from, const ShardSpec& to);

/// The plans of one mesh on one rank. Bounded: emptied when full.
class RedistributionPlans {
 public:
  std::shared_ptr<const RedistributionPlan> of(const ShardSpec& from, const ShardSpec& to);

 private:
  // Holds no spec: a spec keeps the mesh's context alive, which owns this.
  struct Entry {
    std::vector<Placement> from_placements, to_placements;
    Sharding from, to;
    std::shared_ptr<const RedistributionPlan> plan;
  };
  std::mutex mutex_;
  std::unordered_multimap<std::uint64_t, Entry> entries_;
};

}  // namespace tessera::detail
