#pragma once
// Plans of operators by index where rows are sharded over some ranks and the index over the same
// ones: nodes of a graph, and the edges that name them. Each rank's indices name rows that it owns
// and rows of others, its ghosts; which ones is agreed once for an index and kept.
//
// A plan is found again by the index tensor (the tensor itself, or the one that it is a view of),
// without a word to the other ranks: all of them run one program, so that the same tensor is the
// same on all. Of a tensor that is met for the first time the ranks compare the values with those
// of the plans that they keep, in one call of eight bytes each.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/ops/ghosts/detail/ordered_sums.h"
#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

struct RowPlan {
  std::shared_ptr<GhostState> state;
  /// For each of this rank's indices: the row of the local array, owned rows first, then ghosts.
  at::Tensor rows;
  /// How many indices of all ranks name each owned row.
  at::Tensor counts;
  /// This rank's first row, and the ids of its ghosts in ascending order.
  std::int64_t begin = 0;
  std::vector<std::int64_t> ghosts;
  /// The ghosts of all ranks; 0: no rank needs another.
  std::int64_t all_ghosts = 0;
  std::shared_ptr<const CallOrigin> origin;
  /// How sums are taken by an index that has an order; nullptr: as ghosts are.
  std::shared_ptr<const OrderedSums> ordered = nullptr;

  std::int64_t owned() const { return state->rows.owned; }
};
using RowPlanPtr = std::shared_ptr<const RowPlan>;

/// The plan of an index that names rows of a dim that is sharded as `rows`. `index` is sharded
/// along dim 0 over the same axes; dims behind it are expanded. nullptr if an index of any rank is
/// negative or out of range: the same on all ranks. Collective, unless the plan is found by the
/// tensor. Throws InvalidArgument, with the ids, if the tensor was written to since its plan was
/// made: on the other ranks PeerFailedError, unless they throw it too. Throws it on every rank for
/// an index that has an order of another length, or on some ranks alone.
RowPlanPtr row_plan(const char* op, const at::Tensor& index, const DimSharding& rows);

namespace indexed_rows {

/// True if `index` names rows along `dim` of `x`, and both lie on the same ranks in a way that the
/// exchange of ghosts serves; false: the operator's rule knows better.
bool names_rows_of(const at::Tensor& x, std::int64_t dim, const at::Tensor& index);
/// As `x`, with dim `d` of the size and the shards of the index.
ShardSpec with_places(const ShardSpec& x, int d, const ShardSpec& index);

}  // namespace indexed_rows

}  // namespace tessera::detail
