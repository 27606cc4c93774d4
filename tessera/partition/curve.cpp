#include "tessera/partition/curve.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/partition/detail/points.h"
#include "tessera/partition/internal/division.h"

namespace tessera {
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
  std::vector<std::int64_t> order(position.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::ranges::stable_sort(order, [&](std::int64_t a, std::int64_t b) {
    return position[static_cast<std::size_t>(a)] < position[static_cast<std::size_t>(b)];
  });
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
