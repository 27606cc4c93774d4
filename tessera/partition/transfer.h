#pragma once
// Transfer plan: what one rank sends and receives when an array is redistributed from one sharding
// to another.

#include <cstdint>
#include <vector>

#include "tessera/partition/sharding.h"

namespace tessera {

/// A box that is sent from this rank to `rank` or received from it, in global indices.
struct Piece {
  int rank;
  Box box;
  bool operator==(const Piece&) const = default;
};

/// Pieces with the same peer are in the same order on both sides. What is in both of a rank's own
/// boxes is copied, never sent.
struct TransferPlan {
  std::vector<Piece> sends, receives;
  std::vector<Box> copies;
  /// Number of elements sent, and received.
  std::int64_t sent() const;
  std::int64_t received() const;
  bool local() const { return sends.empty() && receives.empty(); }
};

/// The plan of global rank `rank`, which may be in one of the meshes, both or neither. The arrays
/// have the same shape.
///
/// Each element that a rank needs and does not hold is received exactly once, from a rank that
/// holds it: among those that hold the same box, the one whose position on the source's free axes
/// equals the receiver's when both are on one mesh (so that copies stay within a replica), and
/// otherwise one chosen in turn by the receiver's position. So the elements received are the fewest
/// possible: volume(target box) - volume(target box in own source box).
TransferPlan transfer_plan(const Sharding& from, const Sharding& to, int rank);

}  // namespace tessera
