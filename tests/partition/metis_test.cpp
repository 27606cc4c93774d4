#include "tessera/partition/partitioners.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <numeric>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

struct Graph {
  std::int64_t nodes = 0;
  std::vector<double> places;
  std::vector<std::int64_t> source, target;
};

// Triangles between the places of a lattice that are moved at random; a part of it is cut away.
Graph drawn_mesh(Generator& random, std::int64_t width, std::int64_t height) {
  Graph mesh;
  std::vector<std::int64_t> number;
  const std::int64_t hole = random.number(0, width * height / 3);
  for (std::int64_t i = 0; i < width * height; ++i) {
    number.push_back(i % width > width / 2 && i < hole ? -1 : mesh.nodes++);
    if (number.back() < 0) continue;
    mesh.places.push_back(static_cast<double>(i % width) + 0.01 * random.number(-40, 40));
    mesh.places.push_back(static_cast<double>(i / width) + 0.01 * random.number(-40, 40));
  }
  const auto join = [&](std::int64_t a, std::int64_t b) {
    const auto from = number[static_cast<std::size_t>(a)], to = number[static_cast<std::size_t>(b)];
    if (from < 0 || to < 0) return;
    for (const auto& [s, t] : {std::pair(from, to), std::pair(to, from)})
      mesh.source.push_back(s), mesh.target.push_back(t);
  };
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x) {
      const std::int64_t i = y * width + x;
      if (x + 1 < width) join(i, i + 1);
      if (y + 1 < height) join(i, i + width);
      if (x + 1 < width && y + 1 < height)
        random.chance(2) ? join(i, i + width + 1) : join(i + 1, i + width);
    }
  return mesh;
}

TEST(MetisTest, CutsFewerEdgesOfAMeshThanTheCurve) {
  Generator random(3);
  for (int n = 0; n < 24; ++n) {
    const Graph mesh = drawn_mesh(random, random.number(24, 60), random.number(24, 60));
    const int parts = static_cast<int>(random.number(2, 9));
    const auto owner = partition_by_metis(mesh.nodes, mesh.source, mesh.target, parts);
    const auto metis = quality_of(owner, parts, mesh.source, mesh.target);
    const auto curve =
        quality_of(partition_along_curve(mesh.places, 2, parts), parts, mesh.source, mesh.target);
    EXPECT_LE(metis.cut, curve.cut) << metis.summary() << curve.summary();
    EXPECT_LE(metis.imbalance(), 1.06) << metis.summary();
    EXPECT_EQ(*std::ranges::max_element(owner), parts - 1);
    EXPECT_EQ(partition_by_metis(mesh.nodes, mesh.source, mesh.target, parts), owner);
    // Neither direction nor order of edges matters where all come in both.
    std::vector<std::int64_t> source(mesh.target.rbegin(), mesh.target.rend()),
        target(mesh.source.rbegin(), mesh.source.rend());
    source.push_back(3), target.push_back(3);
    EXPECT_EQ(partition_by_metis(mesh.nodes, source, target, parts), owner);
  }
}

TEST(MetisTest, DividesTheWeight) {
  Generator random(5);
  for (int n = 0; n < 12; ++n) {
    const Graph mesh = drawn_mesh(random, 40, random.number(30, 50));
    std::vector<double> weights;
    for (std::int64_t i = 0; i < mesh.nodes; ++i)
      weights.push_back(i < mesh.nodes / 4 ? 4e-3 : 1e-3);
    const auto owner = partition_by_metis(mesh.nodes, mesh.source, mesh.target, 4, weights);
    std::vector<double> sums(4, 0.0);
    for (std::size_t i = 0; i < owner.size(); ++i)
      sums[static_cast<std::size_t>(owner[i])] += weights[i];
    const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / 4;
    for (const double sum : sums) EXPECT_LE(sum, 1.06 * mean);
  }
}

// Any graph: isolated nodes, loops, repeated edges, no edges, fewer nodes than parts.
TEST(MetisTest, OwnersAreParts) {
  Generator random(9);
  for (int n = 0; n < 200; ++n) {
    const std::int64_t nodes = random.number(0, 40);
    const int parts = static_cast<int>(random.number(1, 12));
    std::vector<std::int64_t> source, target;
    std::vector<double> weights;
    for (std::int64_t e = random.number(0, 80); nodes > 0 && e > 0; --e) {
      source.push_back(random.number(0, nodes - 1));
      target.push_back(random.number(0, nodes - 1));
    }
    if (random.chance(2))
      for (std::int64_t i = 0; i < nodes; ++i)
        weights.push_back(static_cast<double>(i == 0 ? 1 : random.number(0, 3)));
    const auto owner = partition_by_metis(nodes, source, target, parts, weights);
    ASSERT_EQ(owner.size(), static_cast<std::size_t>(nodes));
    EXPECT_EQ(quality_of(owner, parts, source, target).nodes, nodes);  // refuses other owners
    for (std::int64_t i = 0; parts >= nodes && i < nodes; ++i)
      EXPECT_EQ(owner[static_cast<std::size_t>(i)], i);
  }
}

TEST(MetisTest, SignalsAreHandledAsBefore) {
  struct sigaction mine{};
  mine.sa_handler = [](int) {};
  mine.sa_flags = SA_RESTART;
  struct sigaction before{}, after{};
  sigaction(SIGTERM, &mine, &before);
  std::vector<std::int64_t> source, target;
  for (std::int64_t i = 0; i + 1 < 50; ++i) {
    source.push_back(i);
    target.push_back(i + 1);
  }
  partition_by_metis(50, source, target, 3);
  sigaction(SIGTERM, &before, &after);
  EXPECT_EQ(after.sa_handler, mine.sa_handler);
  EXPECT_EQ(after.sa_flags & (SA_RESTART | SA_RESETHAND | SA_NODEFER), SA_RESTART);
  sigset_t held;
  pthread_sigmask(SIG_BLOCK, nullptr, &held);
  EXPECT_FALSE(sigismember(&held, SIGTERM));
}

TEST(MetisTest, RefusesWhatIsNoGraph) {
  const std::vector<std::int64_t> one{0}, two{0, 1}, beyond{3};
  const std::vector<double> weight{1}, negative{1, -1, 1};
  EXPECT_THROW(partition_by_metis(3, one, two, 2), InvalidArgument);
  EXPECT_THROW(partition_by_metis(3, one, beyond, 2), InvalidArgument);
  EXPECT_THROW(partition_by_metis(3, one, one, 0), InvalidArgument);
  EXPECT_THROW(partition_by_metis(-1, {}, {}, 2), InvalidArgument);
  EXPECT_THROW(partition_by_metis(3, one, one, 2, weight), InvalidArgument);
  EXPECT_THROW(partition_by_metis(3, one, one, 2, negative), InvalidArgument);
  EXPECT_THROW(partition_by_metis(std::int64_t{1} << 33, {}, {}, 2), InvalidArgument);
}

}  // namespace
}  // namespace tessera
