#pragma once
// Points divided by all ranks together, each of which knows its own points alone: what it learns of
// the others are sums and maxima, as many numbers as there are parts. partitioners.h has the same
// of one process.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tessera::detail {

/// This rank's part of all points: coordinates and weights are finite, weights not negative.
struct PointsHere {
  /// Points x dims, row-major.
  std::span<const double> coordinates;
  int dims = 1;
  /// One for each point; `weighted` false: 1 each.
  std::span<const double> weights = {};
  bool weighted = false;
  /// The number of the first one: points of a rank are consecutive.
  std::int64_t first = 0;
};

/// Each replaces the numbers by those of all ranks, element by element. Empty: there is one rank.
struct SharedSums {
  std::function<void(std::span<std::int64_t>)> sum, max;
};

/// Costs as whole numbers in proportion to the weights, of a sum over all ranks below 2^61: sums
/// of them do not depend on the order. All 0 where all weights are.
std::vector<std::int64_t> whole_costs(const PointsHere& points, const SharedSums& over);

/// The part of each point of this rank, by recursive coordinate bisection, and along Hilbert's
/// curve (at most 8 dims). `costs`: by whole_costs(). Where a point straddles a cut, it goes where
/// more than half of it lies. Collective where `over` is.
std::vector<int> bisected(const PointsHere& points, std::span<const std::int64_t> costs, int parts,
                          const SharedSums& over);
std::vector<int> along_curve(const PointsHere& points, std::span<const std::int64_t> costs,
                             int parts, const SharedSums& over);

/// Throws InvalidArgument for dims that the curve does not have.
void require_curve(int dims);
/// The position along the curve of each point in the cube at `low` that extends so far.
std::vector<std::uint64_t> curve_positions(std::span<const double> coordinates, int dims,
                                           std::span<const double> low, double extent);

}  // namespace tessera::detail
