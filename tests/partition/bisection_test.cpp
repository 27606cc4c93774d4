#include "tessera/partition/partitioners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "generate.h"
#include "tessera/base/error.h"
#include "tessera/partition/ghosts.h"

namespace tessera {
namespace {

using testing::Generator;

std::vector<double> draw_points(Generator& random, std::int64_t points, int dims) {
  std::vector<double> coordinates;
  const std::int64_t values = random.chance(3) ? 3 : 1 << 20;  // many at one place, or few
  for (std::int64_t i = 0; i < points * dims; ++i)
    coordinates.push_back(static_cast<double>(random.number(0, values)));
  return coordinates;
}

std::vector<std::int64_t> sizes_of(const std::vector<int>& owner, int parts) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(parts), 0);
  for (const int part : owner) ++sizes.at(static_cast<std::size_t>(part));
  return sizes;
}

TEST(BisectedPoints, PartsDifferByOnePointAndDoNotDependOnChance) {
  Generator random(5);
  for (int n = 0; n < 1500; ++n) {
    const int dims = static_cast<int>(random.number(1, 4)),
              parts = static_cast<int>(random.number(1, 12));
    const auto points = random.number(0, 60);
    const auto coordinates = draw_points(random, points, dims);
    const auto owner = bisect_points(coordinates, dims, parts);
    ASSERT_EQ(static_cast<std::int64_t>(owner.size()), points);
    const auto sizes = sizes_of(owner, parts);
    const auto [least, most] = std::ranges::minmax_element(sizes);
    ASSERT_LE(*most - *least, 1);
    ASSERT_EQ(owner, bisect_points(coordinates, dims, parts));
  }
}

// The first division is by a plane across the dim in which the points extend farthest.
TEST(BisectedPoints, TwoPartsAreApartAlongTheWidestDim) {
  Generator random(6);
  for (int n = 0; n < 300; ++n) {
    const auto points = random.number(2, 40);
    std::vector<double> coordinates;
    for (std::int64_t i = 0; i < points; ++i) {
      coordinates.push_back(static_cast<double>(random.number(0, 100)));
      coordinates.push_back(static_cast<double>(random.number(0, 1000000)));
    }
    coordinates[1] = 0;
    coordinates[3] = 1000000;
    const auto owner = bisect_points(coordinates, 2, 2);
    double end = -1, begin = 2e6;
    for (std::size_t i = 0; i < owner.size(); ++i) {
      if (owner[i] == 0)
        end = std::max(end, coordinates[2 * i + 1]);
      else
        begin = std::min(begin, coordinates[2 * i + 1]);
    }
    ASSERT_LE(end, begin);
  }
}

TEST(BisectedPoints, WeightsAreBalanced) {
  Generator random(7);
  for (int n = 0; n < 500; ++n) {
    const auto points = random.number(1, 80);
    const int parts = static_cast<int>(random.number(1, 8));
    const auto coordinates = draw_points(random, points, 2);
    std::vector<double> weights, of_part(static_cast<std::size_t>(parts), 0);
    for (std::int64_t i = 0; i < points; ++i)
      weights.push_back(static_cast<double>(random.number(i == 0 ? 1 : 0, 20)));
    const auto owner = bisect_points(coordinates, 2, parts, weights);
    for (std::size_t i = 0; i < owner.size(); ++i)
      of_part[static_cast<std::size_t>(owner[i])] += weights[i];
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    // Each of the divisions is off by half of the heaviest point.
    const double off = std::ceil(std::log2(parts) + 1) * 10;
    for (const double weight : of_part) ASSERT_LE(std::abs(weight - all / parts), off);
  }
  const std::vector<double> line{0, 1, 2, 3}, weights{3, 1, 1, 1};
  EXPECT_EQ(bisect_points(line, 1, 2, weights), (std::vector<int>{0, 1, 1, 1}));
}

// A grid of 30 x 30 nodes with edges to the neighbours, in both directions.
TEST(PartitionQuality, OfAGridIsThatOfItsPlan) {
  constexpr int kSide = 30, kParts = 4;
  std::vector<double> coordinates;
  std::vector<std::int64_t> source, target;
  for (int y = 0; y < kSide; ++y) {
    for (int x = 0; x < kSide; ++x) {
      coordinates.insert(coordinates.end(), {double(x), double(y)});
      const int node = y * kSide + x;
      for (const int next : {x + 1 < kSide ? node + 1 : -1, y + 1 < kSide ? node + kSide : -1}) {
        if (next < 0) continue;
        source.insert(source.end(), {node, next});
        target.insert(target.end(), {next, node});
      }
    }
  }
  const auto owner = bisect_points(coordinates, 2, kParts);
  const PartitionQuality quality = quality_of(owner, kParts, source, target);
  EXPECT_EQ(quality.summary(),
            "4 parts of 900 nodes: 225 to 225, imbalance 1.00; 120 of 3480 edges cut (3.4%), 120 "
            "ghosts, at most 30 in a part, at most 2 peers\n");

  std::vector<std::vector<std::int64_t>> owned(kParts), sources(kParts), needed(kParts);
  for (std::size_t i = 0; i < owner.size(); ++i)
    owned[owner[i]].push_back(static_cast<std::int64_t>(i));
  for (std::size_t e = 0; e < source.size(); ++e) sources[owner[target[e]]].push_back(source[e]);
  for (int r = 0; r < kParts; ++r) needed[r] = ghosts_of(owned[r], sources[r]);
  for (const GhostRows& plan : plan_ghosts(owned, needed)) {
    EXPECT_EQ(plan.ghosts, quality.ghosts[plan.rank]);
    EXPECT_EQ(static_cast<std::int64_t>(plan.receives.size()), quality.peers[plan.rank]);
  }
  // A partition by chance is far worse.
  Generator random(8);
  std::vector<int> drawn(owner.size());
  for (int& part : drawn) part = static_cast<int>(random.number(0, kParts - 1));
  EXPECT_GT(quality_of(drawn, kParts, source, target).ghost_rows(), 10 * quality.ghost_rows());
}

TEST(PartitionQuality, OfNothingIsEven) {
  const PartitionQuality quality = quality_of({}, 3, {}, {});
  EXPECT_EQ(quality.imbalance(), 1);
  EXPECT_EQ(
      quality.summary(),
      "3 parts of 0 nodes: 0 to 0, imbalance 1.00; 0 of 0 edges cut (0.0%), 0 ghosts, at most "
      "0 in a part, at most 0 peers\n");
}

TEST(BisectedPoints, BadRequestsAreRefused) {
  const std::vector<double> three{0, 1, 2}, nan{0, std::nan(""), 1}, negative{1, -1, 1},
      nothing{0, 0, 0}, infinite{std::numeric_limits<double>::infinity(), 1, 1};
  EXPECT_THROW(bisect_points(three, 2, 2), InvalidArgument);
  EXPECT_THROW(bisect_points(three, 0, 2), InvalidArgument);
  EXPECT_THROW(bisect_points(three, 1, 0), InvalidArgument);
  EXPECT_THROW(bisect_points(nan, 1, 2), InvalidArgument);
  EXPECT_THROW(bisect_points(infinite, 3, 2), InvalidArgument);
  EXPECT_THROW(bisect_points(three, 1, 2, std::vector<double>{1}), InvalidArgument);
  for (const auto& weights : {negative, nothing, nan, infinite})
    EXPECT_THROW(bisect_points(three, 1, 2, weights), InvalidArgument);
  const std::vector<int> owner{0, 1};
  const std::vector<std::int64_t> none, zero{0}, far{2};
  EXPECT_THROW(quality_of(owner, 1, none, none), InvalidArgument);
  EXPECT_THROW(quality_of(owner, 0, none, none), InvalidArgument);
  EXPECT_THROW(quality_of(owner, 2, zero, none), InvalidArgument);
  EXPECT_THROW(quality_of(owner, 2, zero, far), InvalidArgument);
}

}  // namespace
}  // namespace tessera
