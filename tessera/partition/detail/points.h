#pragma once
// What partitions of points and graphs refuse.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "tessera/base/error.h"

namespace tessera::detail {

/// Their sum; 0 without any. Throws InvalidArgument for other numbers of weights than points, and
/// for weights that are negative, not finite or all zero.
inline double checked_weights(std::span<const double> weights, std::size_t points) {
  if (weights.empty()) return 0;
  if (weights.size() != points)
    throw InvalidArgument(weights.size(), " weights for ", points, " points");
  double all = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] >= 0) || !std::isfinite(weights[i]))
      throw InvalidArgument("point ", i, " has the weight ", weights[i]);
    all += weights[i];
  }
  if (!(all > 0 && std::isfinite(all)))
    throw InvalidArgument("weights whose sum is ", all, " divide nothing");
  return all;
}

/// Throws InvalidArgument for edges that are no pairs of numbers of nodes.
inline void check_edges(std::int64_t nodes, std::span<const std::int64_t> source,
                        std::span<const std::int64_t> target) {
  if (source.size() != target.size())
    throw InvalidArgument(source.size(), " sources of edges and ", target.size(), " targets");
  for (std::size_t e = 0; e < source.size(); ++e)
    for (const std::int64_t node : {source[e], target[e]})
      if (node < 0 || node >= nodes)
        throw InvalidArgument("edge ", e, " names node ", node, " of ", nodes);
}

/// The number of points. Throws InvalidArgument for dims or parts below 1, numbers of coordinates
/// that do not fit, coordinates that are not finite, and what checked_weights() refuses.
inline std::size_t checked_points(std::span<const double> coordinates, int dims, int parts,
                                  std::span<const double> weights) {
  if (dims < 1 || parts < 1)
    throw InvalidArgument("points of ", dims, " dims in ", parts, " parts; give at least 1");
  if (coordinates.size() % static_cast<std::size_t>(dims) != 0)
    throw InvalidArgument(coordinates.size(), " coordinates are no points of ", dims, " dims");
  const std::size_t points = coordinates.size() / static_cast<std::size_t>(dims);
  const auto not_finite =
      std::ranges::find_if_not(coordinates, [](double x) { return std::isfinite(x); });
  if (not_finite != coordinates.end())
    throw InvalidArgument("point ", (not_finite - coordinates.begin()) / dims, " has a coordinate ",
                          *not_finite);
  checked_weights(weights, points);
  return points;
}

}  // namespace tessera::detail
