#pragma once
// Partitions for those who have none: of points by recursive coordinate bisection or along a
// space-filling curve, of graphs by METIS; and what a partition of a graph costs.
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

/// The numbers of the points in the order of Hilbert's curve through the cube around them, which
/// has 2^(62 / dims) places along each dim (J. Skilling, "Programming the Hilbert curve", 2004).
/// Points at one place are in the order of their numbers. `coordinates`: points x dims, row-major.
/// Throws InvalidArgument for numbers of coordinates that do not fit, coordinates that are not
/// finite, and dims outside [1, 8].
std::vector<std::int64_t> curve_order(std::span<const double> coordinates, int dims);

/// The part of each point, 0 .. parts - 1: the curve in pieces of equally many points, or, with
/// `weights`, as equally heavy as they can be where the pieces follow the curve. Parts are less
/// compact than those of bisect_points(), and change little where points move a little or parts are
/// added. Throws as curve_order(), for parts below 1, and for weights as bisect_points().
std::vector<int> partition_along_curve(std::span<const double> coordinates, int dims, int parts,
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

/// A partition of a graph by METIS, where the library was found when Tessera was built.
///
/// The part of each node, 0 .. parts - 1, with few edges between parts and parts that are equally
/// heavy to 3 percent or so (multilevel k-way partitioning: Karypis and Kumar, 1998). Edges are
/// pairs of numbers of nodes, as in quality_of(): in which direction does not matter, one in both
/// counts twice, one that comes again once; edges of a node to itself are left out. `weights`: the
/// cost of each node; none: 1 each. Parts may be empty where there are few nodes. The same graph
/// gives the same parts with the same METIS on the same system: where ranks are not alike, let one
/// partition, and broadcast. Not collective; one call at a time works in a process, others wait.
/// METIS takes SIGTERM while it works: handlers are as before when it is done, and until then a
/// process with other threads that get the signal may end by it.
///
/// Throws NotAvailable in a build without METIS, and InvalidArgument for parts below 1, edges that
/// name other nodes, numbers of sources and targets that differ, weights as bisect_points(), and
/// graphs whose numbers METIS' integers do not hold.
std::vector<int> partition_by_metis(std::int64_t nodes, std::span<const std::int64_t> source,
                                    std::span<const std::int64_t> target, int parts,
                                    std::span<const double> weights = {});

}  // namespace tessera
