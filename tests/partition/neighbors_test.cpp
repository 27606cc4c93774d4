#include "tessera/partition/neighbors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;
using Found = std::tuple<std::int64_t, std::vector<int>, double>;  // point, image, distance

// Points, queries and a box: on a lattice, so that many are equally far, or anywhere, outside too.
struct Places {
  int dims;
  std::vector<double> points, queries, box;
  explicit Places(Generator& random) : dims(static_cast<int>(random.number(1, 3))) {
    const bool lattice = random.chance(2);
    const auto draw = [&](std::int64_t n) {
      std::vector<double> all;
      for (std::int64_t i = 0; i < n * dims; ++i)
        all.push_back(lattice ? static_cast<double>(random.number(-2, 6)) * 0.25
                              : static_cast<double>(random.number(-1000, 2000)) / 999);
      return all;
    };
    points = draw(random.number(0, 25));
    queries = random.chance(2) ? points : draw(random.number(0, 10));
    for (int d = 0; d < dims && random.chance(2); ++d)
      box.push_back(random.chance(3) ? 0 : random.chance(2) ? 1 : 0.75);
    if (box.size() != static_cast<std::size_t>(dims)) box.clear();
  }
  double period(int d) const { return box.empty() ? 0 : box[static_cast<std::size_t>(d)]; }

  // Every image up to six boxes away.
  std::vector<Found> all_of(std::int64_t query) const {
    std::vector<Found> found;
    const auto count = static_cast<std::int64_t>(points.size()) / dims;
    for (std::int64_t p = 0; p < count; ++p) {
      std::vector<int> image(static_cast<std::size_t>(dims), 0);
      for (int d = 0; d < dims; ++d) image[d] = period(d) > 0 ? -6 : 0;
      for (bool more = true; more;) {
        double sum = 0;
        for (int d = 0; d < dims; ++d) {
          const double apart = points[static_cast<std::size_t>(p * dims + d)] +
                               image[d] * period(d) -
                               queries[static_cast<std::size_t>(query * dims + d)];
          sum += apart * apart;
        }
        found.emplace_back(p, image, std::sqrt(sum));
        int d = dims - 1;
        while (d >= 0 && (period(d) == 0 || ++image[d] > 6)) {
          image[d] = period(d) > 0 ? -6 : 0;
          --d;
        }
        more = d >= 0;
      }
    }
    return found;
  }
  std::int64_t count() const { return static_cast<std::int64_t>(queries.size()) / dims; }
};

std::vector<Found> of_query(const Neighbors& all, std::int64_t query, int dims) {
  std::vector<Found> found;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all.query[i] != query) continue;
    const auto first = all.image.begin() + static_cast<std::ptrdiff_t>(i) * dims;
    found.emplace_back(all.point[i], std::vector<int>(first, first + dims), all.distance[i]);
  }
  return found;
}

TEST(NeighborsTest, AreThoseOfAllPairsWithinARadius) {
  Generator random(3);
  for (int n = 0; n < 300; ++n) {
    const Places places(random);
    const double radius = static_cast<double>(random.number(0, 6)) * 0.125;
    const Neighbors got =
        points_within(places.points, places.queries, places.dims, radius, places.box);
    EXPECT_TRUE(std::ranges::is_sorted(got.query));
    for (std::int64_t q = 0; q < places.count(); ++q) {
      auto expected = places.all_of(q);
      std::erase_if(expected, [&](const Found& f) { return std::get<2>(f) > radius; });
      EXPECT_EQ(of_query(got, q, places.dims), expected) << "case " << n << ", query " << q;
    }
  }
}

TEST(NeighborsTest, AreTheNearestOfAllPairsWithTies) {
  Generator random(5);
  for (int n = 0; n < 300; ++n) {
    const Places places(random);
    const int count = static_cast<int>(random.number(1, 6));
    const Neighbors got =
        nearest_points(places.points, places.queries, places.dims, count, places.box);
    for (std::int64_t q = 0; q < places.count(); ++q) {
      auto all = places.all_of(q);
      std::ranges::sort(all, [](const Found& a, const Found& b) {
        return std::tie(std::get<2>(a), std::get<0>(a), std::get<1>(a)) <
               std::tie(std::get<2>(b), std::get<0>(b), std::get<1>(b));
      });
      std::vector<Found> expected;
      std::map<std::int64_t, int> seen;
      for (const Found& f : all)
        if (static_cast<int>(expected.size()) < count && seen[std::get<0>(f)]++ == 0)
          expected.push_back(f);
      EXPECT_EQ(of_query(got, q, places.dims), expected) << "case " << n << ", query " << q;
    }
  }
}

TEST(NeighborsTest, OfManyPointsComeInTimeThatGrowsWithThem) {
  Generator random(7);
  std::vector<double> places;
  for (int i = 0; i < 3 * 40000; ++i)
    places.push_back(static_cast<double>(random.number(0, 1 << 20)) / (1 << 20));
  const std::vector<double> box{1, 1, 1};
  // About ten each: all pairs would be 1.6e9.
  const Neighbors near = points_within(places, places, 3, 0.039, box);
  EXPECT_GT(near.size(), 8 * 40000u);
  EXPECT_LT(near.size(), 14 * 40000u);
  EXPECT_EQ(nearest_points(places, places, 3, 8, box).size(), 8 * 40000u);
}

TEST(NeighborsTest, RefuseWhatIsNoPlace) {
  const std::vector<double> two{0, 1}, three{0, 1, 2}, none;
  const std::vector<double> nan{0, std::nan("")}, negative{-1, 1};
  EXPECT_THROW(points_within(three, two, 2, 1), InvalidArgument);
  EXPECT_THROW(points_within(two, three, 2, 1), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 0, 1), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 9, 1), InvalidArgument);
  EXPECT_THROW(points_within(nan, two, 2, 1), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 2, -1), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 2, std::nan("")), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 2, 1, three), InvalidArgument);
  EXPECT_THROW(points_within(two, two, 2, 1, negative), InvalidArgument);
  EXPECT_THROW(nearest_points(two, two, 2, 0), InvalidArgument);
  EXPECT_EQ(nearest_points(none, two, 2, 3).size(), 0u);
}

}  // namespace
}  // namespace tessera
