#pragma once
// What partitions of points refuse.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {

/// The number of points. Throws InvalidArgument for dims or parts below 1, numbers of coordinates
/// or weights that do not fit, and coordinates that are not finite; for weights that are negative,
/// not finite or all zero.
inline std::size_t checked_points(std::span<const double> coordinates, int dims, int parts,
                                  std::span<const double> weights) {
  if (dims < 1 || parts < 1)
    throw InvalidArgument(
        concat("points of ", dims, " dims in ", parts, " parts; give at least 1"));
  if (coordinates.size() % static_cast<std::size_t>(dims) != 0)
    throw InvalidArgument(
        concat(coordinates.size(), " coordinates are no points of ", dims, " dims"));
  const std::size_t points = coordinates.size() / static_cast<std::size_t>(dims);
  if (!weights.empty() && weights.size() != points)
    throw InvalidArgument(concat(weights.size(), " weights for ", points, " points"));
  const auto not_finite = std::find_if_not(coordinates.begin(), coordinates.end(),
                                           [](double x) { return std::isfinite(x); });
  if (not_finite != coordinates.end())
    throw InvalidArgument(concat("point ", (not_finite - coordinates.begin()) / dims,
                                 " has a coordinate ", *not_finite));
  double all = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] >= 0) || !std::isfinite(weights[i]))
      throw InvalidArgument(concat("point ", i, " has the weight ", weights[i]));
    all += weights[i];
  }
  if (!weights.empty() && !(all > 0 && std::isfinite(all)))
    throw InvalidArgument(concat("weights whose sum is ", all, " divide nothing"));
  return points;
}

}  // namespace tessera::detail
