#pragma once
// Edges between points that are near each other, where the points are divided among ranks: the
// graph of a point cloud, or between two of them. Exact, as points_within() and nearest_points() of
// all points on one process; ranks send each other those points that can be near theirs.
//
//   OwnedRows atoms(mesh, owned);
//   const auto [edges, shift] = edges_within(atoms, places, 0.5, {1, 1, 1});    // periodic
//   at::Tensor x = atoms.shard(places);
//   at::Tensor apart = x.index_select(0, edges[0]) + shift - x.index_select(0, edges[1]);
//   at::Tensor distance = apart.square().sum(1).sqrt();                         // differentiable
//
// Nearest-neighbour interpolation of values on one set of points to another one:
//   at::Tensor there = values.index_select(0, nearest_edges(points, p, queries, q, 1).edges[0]);

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/ops/ghosts/owned_rows.h"

namespace tessera {

struct NeighborEdges {
  /// 2 x the edges of all ranks, sharded along dim 1: numbers of rows, points first, then queries.
  /// Edges are on the owners of their queries, by query in ascending order.
  at::Tensor edges;
  /// Edges x dims, sharded along dim 0, of the places' dtype: what is to be added to the point's
  /// place to get its image. Zeros where nothing is periodic.
  at::Tensor shift;
};

/// An edge from each point at most `radius` away to each point, in both directions; periodic images
/// count, each as an edge. `places`: this rank's, plain or sharded: owned x dims, on any device.
/// `box`: the period along each dim, 0 where there is none; empty: none. `loops`: of each point
/// with itself too. Edges of one query are in ascending order of the point, then of the image.
/// Nothing of it is differentiated: distances are computed of the edges. Collective. Throws
/// InvalidArgument on every rank for places that do not fit, and as points_within().
NeighborEdges edges_within(const OwnedRows& points, const at::Tensor& places, double radius,
                           const std::vector<double>& box = {}, bool loops = false);

/// An edge from each of the `count` nearest points to each query, nearest first, of points equally
/// far the lower rows first. A rank that owns fewer than `count` points is sent all of them.
/// Collective. Throws as above, for a `count` below 1, for fewer points than `count` where there
/// are queries, and for sets of rows of different meshes or axes.
NeighborEdges nearest_edges(const OwnedRows& points, const at::Tensor& places,
                            const OwnedRows& queries, const at::Tensor& query_places, int count,
                            const std::vector<double>& box = {});

}  // namespace tessera
