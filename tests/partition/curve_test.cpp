#include "tessera/partition/partitioners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

// 8 places along each dim.
std::vector<double> lattice(int dims) {
  std::vector<double> all;
  const int points = 1 << (3 * dims);
  for (int i = 0; i < points; ++i)
    for (int d = 0; d < dims; ++d) all.push_back((i >> (3 * d)) & 7);
  return all;
}

TEST(CurveTest, GoesFromEachPlaceOfALatticeToOneBesideIt) {
  for (int dims = 1; dims <= 4; ++dims) {
    const auto places = lattice(dims);
    auto order = curve_order(places, dims);
    for (std::size_t i = 1; i < order.size(); ++i) {
      double apart = 0;
      for (int d = 0; d < dims; ++d)
        apart += std::abs(places[static_cast<std::size_t>(order[i] * dims + d)] -
                          places[static_cast<std::size_t>(order[i - 1] * dims + d)]);
      EXPECT_EQ(apart, 1) << dims << " dims, place " << i;
    }
    std::ranges::sort(order);
    for (std::size_t i = 0; i < order.size(); ++i)
      ASSERT_EQ(order[i], static_cast<std::int64_t>(i));
  }
}

TEST(CurveTest, IsDividedEvenlyAndByWeight) {
  Generator random(11);
  for (int n = 0; n < 60; ++n) {
    const int dims = static_cast<int>(random.number(1, 4));
    const int parts = static_cast<int>(random.number(1, 9));
    const std::int64_t points = random.number(0, 60);
    std::vector<double> places, weights;
    for (std::int64_t i = 0; i < points * dims; ++i)
      places.push_back(static_cast<double>(random.number(0, random.chance(3) ? 2 : 1000)));
    for (std::int64_t i = 0; i < points; ++i)
      weights.push_back(static_cast<double>(random.number(1, 5)));
    const auto even = partition_along_curve(places, dims, parts);
    std::vector<int> along;
    for (const auto point : curve_order(places, dims))
      along.push_back(even[static_cast<std::size_t>(point)]);
    EXPECT_TRUE(std::ranges::is_sorted(along));
    for (int p = 0; p < parts; ++p) {
      const auto size = std::ranges::count(even, p);
      EXPECT_LE(std::abs(static_cast<double>(size) - static_cast<double>(points) / parts), 1);
    }
    if (points == 0) continue;
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    const auto heavy = partition_along_curve(places, dims, parts, weights);
    for (int p = 0; p < parts; ++p) {
      double weight = 0;
      for (std::size_t i = 0; i < heavy.size(); ++i) weight += heavy[i] == p ? weights[i] : 0;
      EXPECT_LE(std::abs(weight - all / parts), 5.0) << "by less than the heaviest point";
    }
  }
}

TEST(CurveTest, CutsFewEdgesOfALattice) {
  const auto places = lattice(2);
  std::vector<std::int64_t> source, target;
  for (std::int64_t i = 0; i < 64; ++i) {
    if (i % 8 < 7) source.push_back(i), target.push_back(i + 1);
    if (i < 56) source.push_back(i), target.push_back(i + 8);
  }
  // Quarters of the square.
  const auto quality = quality_of(partition_along_curve(places, 2, 4), 4, source, target);
  EXPECT_EQ(quality.cut, 16);
  EXPECT_EQ(quality.imbalance(), 1);
}

TEST(CurveTest, RefusesWhatIsNoPoint) {
  const std::vector<double> three{0, 1, 2}, nan{0, std::nan("")}, one{1};
  EXPECT_THROW(curve_order(three, 2), InvalidArgument);
  EXPECT_THROW(curve_order(three, 0), InvalidArgument);
  EXPECT_THROW(curve_order(three, 9), InvalidArgument);
  EXPECT_THROW(curve_order(nan, 2), InvalidArgument);
  EXPECT_THROW(partition_along_curve(three, 1, 0), InvalidArgument);
  EXPECT_THROW(partition_along_curve(three, 1, 2, one), InvalidArgument);
}

}  // namespace
}  // namespace tessera
