#pragma once
// Growing and shrinking: from an old mesh and a new world, the new mesh, and which old coordinate
// moves where.

#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

/// What happens to one process.
struct RankMove {
  enum class Kind { kept, moved, joined, left };
  Kind kind = Kind::kept;
  /// Rank in the old world; -1 for one that joined.
  int old_rank = -1;
  /// Rank in the new world; -1 for one that left.
  int new_rank = -1;
  /// Coordinate in the old mesh; empty for one that joined.
  std::vector<int> from;
  /// Coordinate in the new mesh; empty for one that left.
  std::vector<int> to;
  bool operator==(const RankMove&) const = default;
};

struct MeshResize {
  /// The new mesh, with ranks 0 .. n - 1.
  Mesh mesh;
  /// Survivors and newcomers by new rank, then the ranks that left by old rank.
  std::vector<RankMove> moves;
  int count(RankMove::Kind kind) const;
};

/// Lets `axis` grow or shrink; the other axes keep their sizes. `old_rank_of[r]` is the rank that
/// new rank r had in the old world, -1 for a newcomer (an old rank that was not in the old mesh
/// counts as one too).
///
/// Survivors stay where they are if their coordinate still exists. When the axis shrinks, the
/// slices with the most survivors stay (those beyond the new end take the freed coordinates);
/// survivors of the other slices fill the gaps, first a gap that differs on `axis` alone, where a
/// rank holds the same of the other axes; newcomers take what is left, in mesh order.
/// Deterministic: all ranks compute the same.
///
/// Example: data=3 x model=2, old rank 2 gone, so that 0 1 3 4 5 are 0 1 2 3 4 in the new world and
/// newcomer 5 replaces it: every rank keeps its coordinate and the newcomer gets (1, 0). Without
/// the newcomer 5 ranks are not divisible by model=2: WorldSizeMismatch, with the sizes that would
/// do.
///
/// Throws InvalidArgument for a duplicate old rank and for an unknown axis.
MeshResize resize_mesh(const Mesh& old_mesh, const std::string& axis,
                       const std::vector<int>& old_rank_of);

}  // namespace tessera
