#pragma once
// Several layers of ghosts at once: what a network of L layers of messages reads, so that it runs
// by one exchange instead of L. Rows near a cut are then computed on more than one rank.
//
//   const GhostLayers g = ghost_layers(mesh, owned, source, target, depth);      // collective
//   at::Tensor h = x, e = ghost_exchange(g.edges, features);   // features of edges: once
//   for (int k = 0; k < layers; ++k) {
//     if (k % depth == 0) h = ghost_exchange(g.nodes, h);
//     const int left = g.left_after(k, layers);                // layers of ghosts that stay right
//     h = layer(h, e.narrow(0, 0, g.edges_to(left)), g, left); // -> g.rows_to(left) rows
//   }
//
// Gradients and second derivatives are those of one process, as those of the exchange are: what is
// computed twice is differentiated twice, and its parts are added at the owners.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/ops/ghosts/ghost_plan.h"

namespace tessera {

struct GhostLayers {
  /// The ghosts of all layers: those that this rank's edges read first, and then, layer by layer,
  /// those that edges to the ghosts before read. Each stands in the first layer that it is in.
  GhostPlan nodes;
  /// The edges as rows: this rank's in the order given, then copies of others' by layer of their
  /// targets. To exchange features of edges.
  GhostPlan edges;
  /// Their ids, of the ghosts of `nodes`.
  std::vector<std::int64_t> ghosts;
  /// Both ends of each row of `edges`, as rows of `nodes`.
  std::vector<std::int64_t> source, target;
  /// [l]: owned rows and the ghosts of the first l layers.
  std::vector<std::int64_t> rows_of;
  /// [l]: the edges whose target is among those; for l below the depth.
  std::vector<std::int64_t> edges_of;

  int depth() const { return static_cast<int>(edges_of.size()); }
  /// The rows of the first `l` layers and the owned ones; they are the first of the local array.
  /// Throws InvalidArgument for more layers than the depth.
  std::int64_t rows_to(int l) const;
  /// The edges to rows_to(l); they are the first of all. Throws InvalidArgument unless `l` is below
  /// the depth.
  std::int64_t edges_to(int l) const;
  /// How many layers of ghosts are right after layer `k`, from 0, of a network of `layers` that
  /// exchanges before each layer whose number is a multiple of the depth.
  int left_after(int k, int layers) const;
};

/// `owned`: the ids of this rank's rows; `source`, `target`: of the ends of its edges, which are on
/// the owners of their targets. Edges may come twice, and lead back to their source. Breadth first
/// over the edges that are cut: one exchange of lists for each layer, of edges that end in ghosts
/// alone. Collective. Throws InvalidArgument on every rank for an edge whose target is not
/// owned here, for a source that nobody owns, for numbers of sources and targets that differ, for a
/// depth below 1 or that differs between ranks, and as GhostPlan.
GhostLayers ghost_layers(const DeviceMesh& mesh, std::span<const std::int64_t> owned,
                         std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                         int depth);
/// The ranks are this rank's group along some axes of the mesh, by their indices.
GhostLayers ghost_layers(const DeviceMesh& mesh, const std::vector<int>& axes,
                         std::span<const std::int64_t> owned, std::span<const std::int64_t> source,
                         std::span<const std::int64_t> target, int depth);

/// What things cost, in seconds: a message, a row that is sent, an edge's message with its sum.
/// Measure your own network's and machine's: the defaults are those of 32 features in one host.
struct GhostPrices {
  double message = 10e-6, row = 50e-9, edge = 200e-9;
};

/// What one pass of a network costs by an exchange for every `depth` layers.
struct LayerCost {
  int depth = 1, exchanges = 0;
  /// They count all ranks and exchanges.
  std::int64_t rows_moved = 0, rows_twice = 0, edges_twice = 0;
  /// The ranks whose messages, rows and edges cost most take so long.
  double seconds = 0;
};
struct LayerCosts {
  int layers = 0, ranks = 0;
  /// They begin with depth 1.
  std::vector<LayerCost> depths;
  /// The depth that costs least; of equal ones the smallest.
  int cheapest() const;
  /// A table: a line for each depth, and the cheapest.
  std::string summary() const;
};

/// The costs of a network of `layers` layers by each depth up to that of `ghosts`, the same on all
/// ranks. Collective. Throws InvalidArgument on every rank for fewer than one layer, and for prices
/// that are negative, not finite, or differ.
LayerCosts layer_costs(const GhostLayers& ghosts, int layers, const GhostPrices& prices = {});

}  // namespace tessera
