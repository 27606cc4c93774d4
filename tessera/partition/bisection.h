#pragma once
// Partitions of points for those who have none: recursive coordinate bisection, and what a
// partition of a graph costs.
//
//   std::vector<int> owner = bisect_points(coordinates, 3, ranks);      // n x 3 numbers
//   std::cout << quality_of(owner, ranks, source, target).summary();
//   // 4 parts of 900 nodes: 225 to 225, imbalance 1.00; 120 of 3480 edges cut (3.4%),
//   // 118 ghosts, at most 31 in a part, at most 3 peers
//
// Recursive coordinate bisection (Berger and Bokhari, 1987) divides the points, and the parts, in
// two halves along the dim in which the points extend farthest, and then each half likewise. Parts
// are boxes of points: equally large, compact, and the same wherever it runs.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The part of each point, 0 .. parts - 1. `coordinates`: points x dims, row-major. `weights`: the
/// cost of each point; none: 1 each. Without weights parts differ by at most one point; with them,
/// each division is as even as it can be where it comes in the order of the points along the dim.
/// With fewer points than parts some parts are empty. Points at one place are divided by their
/// number. Time grows as n log n log parts.
///
/// Throws InvalidArgument for numbers of coordinates or weights that do not fit, coordinates that
/// are not finite, weights that are negative, not finite or all zero, dims or parts below 1.
std::vector<int> bisect_points(std::span<const double> coordinates, int dims, int parts,
                               std::span<const double> weights = {});

/// What a partition of a graph's nodes costs where each edge is its target's owner's: the sources
/// that others own are ghosts.
struct PartitionQuality {
  std::int64_t nodes = 0, edges = 0;
  /// Edges between nodes of different owners.
  std::int64_t cut = 0;
  /// Each part has so many nodes, ghosts, and parts from which ghosts come.
  std::vector<std::int64_t> sizes, ghosts, peers;
  /// The ghosts of all parts: rows that are sent in one exchange.
  std::int64_t ghost_rows() const;
  /// The largest part's nodes over the mean; 1 is even. 1 without nodes.
  double imbalance() const;
  std::string summary() const;
};

/// `owner`: of each node, by its number. Edges are pairs of numbers of nodes; several edges of one
/// source into a part need one ghost. Throws InvalidArgument for an owner outside [0, parts), an
/// edge outside the nodes, and numbers of sources and targets that differ.
PartitionQuality quality_of(std::span<const int> owner, int parts,
                            std::span<const std::int64_t> source,
                            std::span<const std::int64_t> target);

}  // namespace tessera
