#pragma once
// A partition of a graph by METIS, where the library was found when Tessera was built.
//
//   std::vector<int> owner = partition_by_metis(nodes, source, target, ranks);
//   std::cout << quality_of(owner, ranks, source, target).summary();   // bisection.h

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

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
