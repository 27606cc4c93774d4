#pragma once
// Growing and shrinking: given an old mesh and a new world, the new mesh, and which old coordinate
// moves where.

#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

/// What becomes of one process.
struct RankMove {
  enum class Kind { kept, moved, joined, left };
  Kind kind = Kind::kept;
  /// -1: joined.
  int old_rank = -1;
  /// -1: left.
  int new_rank = -1;
  /// Coordinate in the old mesh; empty: joined.
  std::vector<int> from;
  /// Coordinate in the new mesh; empty: left.
  std::vector<int> to;
  bool operator==(const RankMove&) const = default;
};

struct MeshResize {
  /// The new mesh, with ranks 0 .. n - 1.
  Mesh mesh;
  /// Survivors and newcomers by new rank, then those that left by old rank.
  std::vector<RankMove> moves;
  int count(RankMove::Kind kind) const;
};

/// Lets `axis` grow or shrink; the other axes keep their sizes. `old_rank_of[r]` is the rank that
/// new rank r had in the old world, -1 for a newcomer (an old rank that was not in the old mesh is
/// one too).
///
/// Survivors stay where they are if their coordinate still exists. When the axis shrinks, the
/// slices with the most survivors stay (those beyond the new end take the freed places); survivors
/// of the others fill the holes, first a hole that differs on `axis` alone, where what a rank holds
/// of the other axes is the same; newcomers take what is left, in mesh order. Deterministic: all
/// ranks compute the same.
///
/// Example: data=3 x model=2, old rank 2 gone, so 0 1 3 4 5 are 0 1 2 3 4 in the new world and
/// newcomer 5 replaces it: every rank keeps its coordinate and the newcomer gets (1, 0). Without
/// the newcomer 5 ranks do not divide by model=2: WorldSizeMismatch, with the sizes that would do.
///
/// Throws InvalidArgument for an old rank that is duplicated, and for an unknown axis.
MeshResize resize_mesh(const Mesh& old_mesh, const std::string& axis,
                       const std::vector<int>& old_rank_of);

}  // namespace tessera
