#pragma once
// OwnedRows: ownership as a placement. A table of owners (a solver's partition, METIS's, any)
// divides rows with ids; numbered rank by rank in each rank's order they are consecutive, and the
// rows of a rank are a shard of dim 0: `Shard(0)` with the ranks' own sizes. Networks that were
// written for one process run on such tensors unchanged: what they select, gather, add and scatter
// by index along rows that are sharded, with an index sharded over the same ranks, exchanges ghosts
// (docs/graphs.md).
//
//   // rank 0 owns ids {7, 2, 9}, rank 1 owns {4}: rows 0, 1, 2 and 3
//   OwnedRows nodes(mesh, owned);
//   at::Tensor x = nodes.shard(features);                  // 4 x any, sharded 3 and 1
//   at::Tensor edges = nodes.edges(source, target);        // 2 x all edges, ids become rows
//   at::Tensor y = net(x, edges);                          // plain torch

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

class OwnedRows {
 public:
  /// The ranks are all of the mesh. `owned`: this rank's ids in the order of its rows, at least 0;
  /// each id has one owner, and a rank may own none. Collective. Throws InvalidArgument on every
  /// rank, with ids and ranks, for an id that two ranks own or one names twice, and a negative one.
  OwnedRows(const DeviceMesh& mesh, std::span<const std::int64_t> owned);
  /// The ranks are this rank's group along some axes of the mesh, by their indices; along the
  /// others ranks hold the same rows.
  OwnedRows(const DeviceMesh& mesh, std::vector<int> axes, std::span<const std::int64_t> owned);

  /// The ids of this rank's rows, in their order.
  const std::vector<std::int64_t>& ids() const { return ids_; }
  /// How many rows each rank of the group owns.
  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  /// The number of this rank's first row.
  std::int64_t begin() const { return begin_; }
  std::int64_t size() const { return size_; }
  const DeviceMesh& mesh() const { return mesh_; }
  /// The ranks that own rows.
  Group group() const { return mesh_.group(axes_); }
  /// Shard(dim) on the axes, Replicate on the others.
  std::vector<Placement> placements(int dim = 0) const;

  /// The sharded tensor of which this rank holds `rows`: one row for each owned id, any dims
  /// behind. Shares memory, and is differentiable, as from_local(). Collective at first. Throws
  /// InvalidArgument on every rank for another number of rows.
  at::Tensor shard(const at::Tensor& rows) const;
  /// The numbers of the rows of `ids`, which any rank may own. Collective; each rank asks for its
  /// own ids. Throws InvalidArgument on every rank, with ids and ranks, for an id that nobody owns.
  std::vector<std::int64_t> numbers(std::span<const std::int64_t> ids) const;
  /// Edges by the ids of both ends, as numbers of rows: 2 x the edges of all ranks, sharded along
  /// dim 1, sources first. Give each edge to the owner of its target, so that a layer exchanges
  /// ghosts once; `anywhere`: edges may be on any rank, and what they add is sent to the owners.
  ///
  /// `order`: the number of each edge in the order of one process, at least 0 and no other edge's.
  /// What is summed by these edges, or a view of them, into rows that are sharded as these are, is
  /// then added edge by edge in this order, in all derivatives: equal to the bit on any number of
  /// ranks and in any division of the rows. A row is sent for each edge whose ends are on two ranks
  /// where else those of a node are added up first. On the CPU.
  ///
  /// Collective. Throws InvalidArgument on every rank, with ids and ranks, for an end that nobody
  /// owns, for numbers of sources, targets and `order` that differ, for an order of which two edges
  /// have a number or that some ranks do not give and, without `anywhere`, for an edge whose target
  /// another rank owns.
  at::Tensor edges(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                   bool anywhere = false,
                   const std::optional<std::span<const std::int64_t>>& order = {}) const;
  /// "60 rows on 3 ranks: 20, 0, 40; this rank's are 20 to 19".
  std::string summary() const;

 private:
  void check_order(std::span<const std::int64_t> order) const;

  DeviceMesh mesh_;
  std::vector<int> axes_;
  std::vector<std::int64_t> ids_, sizes_;
  std::int64_t begin_ = 0, size_ = 0;
};

/// While it lives, what this thread makes of sharded tensors with as many rows as `rows` has
/// (`edges.new_zeros({nodes, 8})`) is sharded as those are, where it would else be replicated. All
/// ranks open and close it at the same places. Values do not depend on it.
class OwnedRowsScope : Pinned {
 public:
  explicit OwnedRowsScope(const OwnedRows& rows);
  ~OwnedRowsScope();

  /// One number per row, of the innermost scope of this thread; empty: there is none.
  static ShardSpec current();

 private:
  ShardSpec outer_;
};

}  // namespace tessera
