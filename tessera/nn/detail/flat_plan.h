#pragma once
// Where the parameters of a unit lie in one flat buffer, and where the buffer is cut. Arithmetic
// only.
//
// Each rank keeps one interval of the buffer and each parameter lies in it in one piece, so that an
// all-gather of the intervals is the buffer: nothing is copied before or after, and a gathered
// parameter is a view. Cuts lie between rows of a parameter, whose shards are then uneven, often
// empty: a bias lies on one rank.
//
//   two parameters of 3 rows of 2 and 4 rows of 1, on 2 ranks (10 elements):
//   plan_flat({{3, 2}, {4, 1}}, 2) -> cuts {0, 6, 10}, rows {{3, 0}, {0, 4}}

#include <cstdint>
#include <vector>

namespace tessera::detail {

struct FlatRows {
  std::int64_t rows;
  /// Elements of a row.
  std::int64_t width;
};

struct FlatPlan {
  /// The offset of each parameter, in elements.
  std::vector<std::int64_t> offset;
  /// How many rows of each parameter each rank keeps.
  std::vector<std::vector<std::int64_t>> rows;
  /// Rank r keeps [cuts[r], cuts[r + 1]).
  std::vector<std::int64_t> cuts;

  std::int64_t numel() const { return cuts.back(); }
  std::vector<std::int64_t> sizes() const;
};

/// Intervals of one size, which every backend moves best, where that takes at most a sixteenth of
/// the buffer (and an element for each rank) as padding; else cuts at the row nearest to an even
/// one, and no padding.
FlatPlan plan_flat(const std::vector<FlatRows>& parameters, int ranks);

}  // namespace tessera::detail
