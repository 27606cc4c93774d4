#include "tessera/partition/bisection.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/partition/detail/points.h"
#include "tessera/partition/internal/division.h"

namespace tessera {
std::vector<int> bisect_points(std::span<const double> coordinates, int dims, int parts,
                               std::span<const double> weights) {
  detail::checked_points(coordinates, dims, parts, weights);
  const detail::PointsHere all{coordinates, dims, weights, !weights.empty()};
  return detail::bisected(all, detail::whole_costs(all, {}), parts, {});
}

std::int64_t PartitionQuality::ghost_rows() const {
  return std::accumulate(ghosts.begin(), ghosts.end(), std::int64_t{0});
}

double PartitionQuality::imbalance() const {
  if (nodes == 0) return 1;
  return static_cast<double>(*std::ranges::max_element(sizes)) * static_cast<double>(sizes.size()) /
         static_cast<double>(nodes);
}

std::string PartitionQuality::summary() const {
  const auto [least, most] = std::ranges::minmax_element(sizes);
  const double share = edges == 0 ? 0 : 100 * static_cast<double>(cut) / static_cast<double>(edges);
  return concat(sizes.size(), " parts of ", nodes, " nodes: ", *least, " to ", *most,
                ", imbalance ", fixed(imbalance(), 2), "; ", cut, " of ", edges, " edges cut (",
                fixed(share, 1), "%), ", ghost_rows(), " ghosts, at most ",
                *std::ranges::max_element(ghosts), " in a part, at most ",
                *std::ranges::max_element(peers), " peers\n");
}

PartitionQuality quality_of(std::span<const int> owner, int parts,
                            std::span<const std::int64_t> source,
                            std::span<const std::int64_t> target) {
  if (parts < 1) throw InvalidArgument(parts, " parts; give at least 1");
  detail::check_edges(static_cast<std::int64_t>(owner.size()), source, target);
  const auto n = static_cast<std::size_t>(parts);
  PartitionQuality quality{static_cast<std::int64_t>(owner.size()),
                           static_cast<std::int64_t>(source.size()),
                           0,
                           std::vector<std::int64_t>(n, 0),
                           std::vector<std::int64_t>(n, 0),
                           std::vector<std::int64_t>(n, 0)};
  for (std::size_t i = 0; i < owner.size(); ++i) {
    if (owner[i] < 0 || owner[i] >= parts)
      throw InvalidArgument("node ", i, " has the owner ", owner[i], " of ", parts);
    ++quality.sizes[static_cast<std::size_t>(owner[i])];
  }
  // The sources that each part needs of others, part by part.
  std::vector<std::vector<std::int64_t>> needed(n);
  for (std::size_t e = 0; e < source.size(); ++e) {
    const auto from = owner[static_cast<std::size_t>(source[e])];
    const auto to = owner[static_cast<std::size_t>(target[e])];
    if (from == to) continue;
    ++quality.cut;
    needed[static_cast<std::size_t>(to)].push_back(source[e]);
  }
  for (std::size_t r = 0; r < n; ++r) {
    std::ranges::sort(needed[r]);
    needed[r].erase(std::unique(needed[r].begin(), needed[r].end()), needed[r].end());
    quality.ghosts[r] = static_cast<std::int64_t>(needed[r].size());
    std::set<int> from;
    for (const std::int64_t node : needed[r]) from.insert(owner[static_cast<std::size_t>(node)]);
    quality.peers[r] = static_cast<std::int64_t>(from.size());
  }
  return quality;
}

}  // namespace tessera
