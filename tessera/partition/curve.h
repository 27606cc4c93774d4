#pragma once
// Points along a space-filling curve: a partition for those who have none, and an order of rows in
// which neighbours are near in memory.

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

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

}  // namespace tessera
