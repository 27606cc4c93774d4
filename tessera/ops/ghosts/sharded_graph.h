#pragma once
// Graphs that ranks have read, sharded over them: one large one, or the samples of a batch, which a
// loader makes one graph without edges between (LoaderOptions::graphs).
//
//   const LoadedBatch batch = loader.next();   // the same on the ranks of a domain
//   const ShardedGraph g = shard_graph(mesh, {1}, batch.field("nodes/owner"),
//                                      batch.field("edges/index"));
//   at::Tensor x = g.of_nodes(batch.field("nodes/x")), of = g.of_nodes(batch.field("nodes/graph"));
//   at::Tensor y = net(x, g.edges, g.of_edges(batch.field("edges/length")));  // plain torch

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/ghosts/owned_rows.h"

namespace tessera {

struct ShardedGraph {
  /// The ids of this rank's rows are their numbers in the graph.
  OwnedRows nodes;
  /// 2 x edges, sharded along dim 1, as numbers of rows; each is with its target.
  at::Tensor edges;
  /// How many edges each rank has, and the numbers in the graph of this rank's.
  std::vector<std::int64_t> edge_sizes;
  at::Tensor own_edges;

  /// This rank's rows of a tensor that has one for each node or edge of the graph, as a sharded
  /// tensor. Collective at first. Throws InvalidArgument on every rank for other numbers of rows.
  at::Tensor of_nodes(const at::Tensor& whole) const;
  at::Tensor of_edges(const at::Tensor& whole) const;
};

/// Shards a graph that each rank of the axes (by their indices) has read completely. `owner`: of
/// each node, as rank in that group. `index`: 2 x edges, int64, numbers of nodes, sources first.
/// `ordered`: sums by the edges are taken in their order here, see OwnedRows::edges(); equal to the
/// bit on any number of ranks. Collective. Throws InvalidArgument on all ranks for other shapes and
/// dtypes, owners and nodes that there are not, and graphs that differ between the ranks.
ShardedGraph shard_graph(const DeviceMesh& mesh, std::vector<int> axes, const at::Tensor& owner,
                         const at::Tensor& index, bool ordered = false);

}  // namespace tessera
