#include "tessera/partition/partitioners.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
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
    ++quality.sizes[owner[i]];
  }
  // The sources that each part needs of others, part by part.
  std::vector<std::vector<std::int64_t>> needed(n);
  for (std::size_t e = 0; e < source.size(); ++e) {
    const auto from = owner[source[e]];
    const auto to = owner[target[e]];
    if (from == to) continue;
    ++quality.cut;
    needed[to].push_back(source[e]);
  }
  for (std::size_t r = 0; r < n; ++r) {
    std::ranges::sort(needed[r]);
    needed[r].erase(std::unique(needed[r].begin(), needed[r].end()), needed[r].end());
    quality.ghosts[r] = static_cast<std::int64_t>(needed[r].size());
    std::set<int> from;
    for (const std::int64_t node : needed[r]) from.insert(owner[node]);
    quality.peers[r] = static_cast<std::int64_t>(from.size());
  }
  return quality;
}

namespace {

constexpr int kMostCurveDims = 8;
using Axes = std::array<std::uint64_t, kMostCurveDims>;

// The position along the curve of a place, by Skilling's exchanges and inversions of axes, whose
// bits are then interleaved.
std::uint64_t position_of(Axes x, int dims, int bits) {
  if (dims == 1) return x[0];
  const std::uint64_t top = std::uint64_t{1} << (bits - 1);
  for (std::uint64_t q = top; q > 1; q >>= 1) {
    const std::uint64_t below = q - 1;
    for (int i = 0; i < dims; ++i) {
      if (x[i] & q) {
        x[0] ^= below;
      } else {
        const std::uint64_t swapped = (x[0] ^ x[i]) & below;
        x[0] ^= swapped;
        x[i] ^= swapped;
      }
    }
  }
  for (int i = 1; i < dims; ++i) x[i] ^= x[i - 1];
  std::uint64_t flips = 0;
  for (std::uint64_t q = top; q > 1; q >>= 1)
    if (x[dims - 1] & q) flips ^= q - 1;
  std::uint64_t position = 0;
  for (int b = bits - 1; b >= 0; --b)
    for (int i = 0; i < dims; ++i) position = position << 1 | (((x[i] ^ flips) >> b) & 1);
  return position;
}

}  // namespace

std::vector<std::uint64_t> detail::curve_positions(std::span<const double> coordinates, int dims,
                                                   std::span<const double> low, double extent) {
  const auto n = static_cast<std::size_t>(dims);
  const int bits = 62 / dims;
  const double most = std::ldexp(1.0, bits) - 1;
  std::vector<std::uint64_t> position;
  position.reserve(coordinates.size() / n);
  for (std::size_t i = 0; i < coordinates.size(); i += n) {
    Axes x{};
    for (std::size_t d = 0; d < n; ++d) {
      const double along = extent > 0 ? (coordinates[i + d] - low[d]) / extent : 0;
      x[d] = static_cast<std::uint64_t>(std::clamp(std::floor(along * most), 0.0, most));
    }
    position.push_back(position_of(x, dims, bits));
  }
  return position;
}

void detail::require_curve(int dims) {
  if (dims < 1 || dims > kMostCurveDims)
    throw InvalidArgument("a curve through ", dims, " dims; give 1 to ", kMostCurveDims);
}

std::vector<std::int64_t> curve_order(std::span<const double> coordinates, int dims) {
  detail::require_curve(dims);
  const auto n = static_cast<std::size_t>(dims);
  detail::checked_points(coordinates, dims, 1, {});
  std::array<double, kMostCurveDims> low{};
  double extent = 0;
  for (std::size_t d = 0; d < n; ++d) {
    double high = -std::numeric_limits<double>::infinity();
    low[d] = -high;
    for (std::size_t i = d; i < coordinates.size(); i += n) {
      low[d] = std::min(low[d], coordinates[i]);
      high = std::max(high, coordinates[i]);
    }
    extent = std::max(extent, high - low[d]);
  }
  const auto position = detail::curve_positions(coordinates, dims, low, extent);
  std::vector<std::int64_t> order = numbers_below<std::int64_t>(position.size());
  std::ranges::stable_sort(order, {}, [&](std::int64_t i) { return position[i]; });
  return order;
}

std::vector<int> partition_along_curve(std::span<const double> coordinates, int dims, int parts,
                                       std::span<const double> weights) {
  detail::require_curve(dims);
  detail::checked_points(coordinates, dims, parts, weights);
  const detail::PointsHere all{coordinates, dims, weights, !weights.empty()};
  return detail::along_curve(all, detail::whole_costs(all, {}), parts, {});
}

}  // namespace tessera
