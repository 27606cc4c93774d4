#include "tessera/partition/partition.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

TEST(Partition, OwnersAndOverlapsMatchALinearSearch) {
  Generator random(1);
  for (int n = 0; n < 2000; ++n) {
    const Partition p = random.partition(static_cast<int>(random.number(1, 9)), 6);
    std::int64_t index = 0;
    for (int part = 0; part < p.parts(); ++part)
      for (std::int64_t i = 0; i < p.size(part); ++i, ++index) ASSERT_EQ(p.owner(index), part);
    ASSERT_EQ(index, p.extent());
    EXPECT_THROW(p.owner(index), InvalidArgument);
    EXPECT_THROW(p.owner(-1), InvalidArgument);
    const Interval range{random.number(-2, p.extent() + 2), random.number(-2, p.extent() + 2)};
    const Interval parts = p.overlapping(range);
    for (int part = 0; part < p.parts(); ++part) {
      const bool meets = !intersect(p.interval(part), range).empty();
      EXPECT_TRUE(!meets || parts.contains(part));
      EXPECT_TRUE(meets || parts.empty() || (part != parts.begin && part != parts.end - 1));
    }
  }
}

TEST(Partition, BuildersCoverTheExtent) {
  Generator random(2);
  for (int n = 0; n < 2000; ++n) {
    const auto extent = random.number(0, 40);
    const auto parts = static_cast<int>(random.number(1, 9));
    const auto even = Partition::even(extent, parts), chunked = Partition::chunked(extent, parts);
    EXPECT_EQ(even.extent(), extent);
    EXPECT_EQ(chunked.extent(), extent);
    for (int p = 1; p < parts; ++p) {
      EXPECT_GE(even.size(p - 1), even.size(p));
      EXPECT_GE(even.size(p) + 1, even.size(0));
      EXPECT_GE(chunked.size(p - 1), chunked.size(p));
    }
    std::vector<double> weights(parts);
    for (auto& w : weights) w = static_cast<double>(random.number(0, 5));
    if (std::accumulate(weights.begin(), weights.end(), 0.0) == 0) {
      EXPECT_THROW(Partition::weighted(extent, weights), InvalidArgument);
      continue;
    }
    const auto weighted = Partition::weighted(extent, weights);
    EXPECT_EQ(weighted.extent(), extent);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (int p = 0; p < parts; ++p)
      EXPECT_LT(std::abs(static_cast<double>(weighted.size(p)) -
                         static_cast<double>(extent) * weights[p] / total),
                1.0);
  }
  EXPECT_EQ(Partition::weighted(10, std::vector<double>{1, 3}).sizes(),
            (std::vector<std::int64_t>{3, 7}));
  EXPECT_EQ(Partition::chunked(5, 4).sizes(), (std::vector<std::int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(Partition::even(7, 3).sizes(), (std::vector<std::int64_t>{3, 2, 2}));
  const auto largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(Partition::even(largest, 3).extent(), largest);
  EXPECT_EQ(Partition::chunked(largest, 3).extent(), largest);
  EXPECT_EQ(Partition::weighted(largest, std::vector<double>{1, 1, 1}).extent(), largest);
}

TEST(Partition, RefusesWhatIsNoPartition) {
  EXPECT_THROW(Partition({1, -1}), InvalidArgument);
  EXPECT_THROW(Partition({std::numeric_limits<std::int64_t>::max(), 1}), InvalidArgument);
  EXPECT_THROW(Partition::even(-1, 2), InvalidArgument);
  EXPECT_THROW(Partition::even(4, 0), InvalidArgument);
  EXPECT_THROW(Partition::weighted(4, std::vector<double>{1, -1}), InvalidArgument);
}

TEST(Sharding, BoxesOfDistinctBlocksTileTheArray) {
  Generator random(3);
  for (int n = 0; n < 3000; ++n) {
    const auto mesh = random.mesh(3, 16);
    std::vector<std::int64_t> shape(random.number(0, 3));
    for (auto& extent : shape) extent = random.number(0, 7);
    const Sharding s = random.sharding(shape, mesh, {});
    std::int64_t replicas = 1;
    for (int axis : s.free_axes()) replicas *= mesh[axis];
    std::int64_t held = 0;
    for (int p = 0; p < s.positions(); ++p) held += volume(s.box(p));
    EXPECT_EQ(
        held,
        replicas * volume(Sharding(shape, {1}, std::vector<DimSharding>(shape.size())).box(0)));
    Box region(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d)
      region[d] = {random.number(-1, 4), random.number(0, 8)};
    std::vector<int> visited(s.positions(), 0);
    s.for_each_overlapping(region, [&](int position, const Box& box) {
      ++visited[position];
      EXPECT_EQ(box, intersect(region, s.box(position)));
    });
    for (int p = 0; p < s.positions(); ++p)
      EXPECT_EQ(visited[p], volume(intersect(region, s.box(p))) > 0 ? 1 : 0);
  }
}

TEST(Sharding, RefusesWhatDoesNotFit) {
  // sum
  EXPECT_THROW(Sharding({7}, {2}, {{{0}, Partition({3, 3})}}), InvalidArgument);
  // count
  EXPECT_THROW(Sharding({7}, {2}, {{{0}, Partition({3, 2, 2})}}), InvalidArgument);
  // axis
  EXPECT_THROW(Sharding({7}, {2}, {{{1}, Partition({3, 4})}}), InvalidArgument);
  // twice
  EXPECT_THROW(Sharding({2, 2}, {2}, {{{0}, Partition({1, 1})}, {{0}, Partition({1, 1})}}),
               InvalidArgument);
  // ranks
  EXPECT_THROW(Sharding({7}, {2}, {{}}, {0, 1, 2}), InvalidArgument);
}

}  // namespace
}  // namespace tessera
