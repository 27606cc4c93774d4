// Edges between points that ranks share out, beside all points on one process.

#include "tessera/ops/ghosts/neighbor_edges.h"

#include <gtest/gtest.h>

#include "cut_rows.h"
#include "tessera/partition/neighbors.h"

namespace tessera::test::neighbor_edges_test {
namespace {

// Points of drawn owners, numbered by owner; the same on every rank that draws them.
struct Cloud {
  at::Tensor places;  // of all, by number
  Sizes sizes;
  Cloud(Draw& draw, int ranks, int dims, int least) {
    sizes = draw.sizes(draw.between(least, 14), ranks);
    const std::int64_t points = Partition(sizes).extent();
    seed(static_cast<std::uint64_t>(draw.below(1 << 20)));
    // On a lattice many are equally far.
    places = draw.chance(50) ? randint(5, {points, dims}).to(at::kDouble).mul(0.25)
                             : rand({points, dims}, at::kDouble).mul(1.5);
  }
  OwnedRows rows(const DeviceMesh& mesh) const {
    const Interval own = Partition(sizes).interval(mesh.all().rank());
    Ids ids;
    for (auto i = own.begin; i < own.end; ++i) ids.push_back(100 - i);
    return {mesh, ids};
  }
  at::Tensor own(const OwnedRows& rows) const {
    return places.narrow(0, rows.begin(), static_cast<std::int64_t>(rows.ids().size())).clone();
  }
  std::span<const double> all() const {
    return {places.const_data_ptr<double>(), static_cast<std::size_t>(places.numel())};
  }
};

void expect_edges(const NeighborEdges& got, const Neighbors& near, const std::vector<double>& box,
                  const std::string& what) {
  Ids from, to;
  std::vector<double> moved;
  const std::size_t dims = near.size() == 0 ? 0 : near.image.size() / near.size();
  for (std::size_t e = 0; e < near.size(); ++e) {
    from.push_back(near.point[e]);
    to.push_back(near.query[e]);
    for (std::size_t d = 0; d < dims; ++d)
      moved.push_back(box.empty() ? 0 : near.image[e * dims + d] * box[d]);
  }
  const at::Tensor edges = full_tensor(got.edges), shift = full_tensor(got.shift);
  EXPECT_TRUE(edges.equal(at::stack({at::tensor(from, at::kLong), at::tensor(to, at::kLong)})))
      << what << '\n'
      << edges;
  EXPECT_TRUE(shift.reshape(-1).equal(at::tensor(moved, at::kDouble))) << what;
}

std::vector<double> draw_box(Draw& draw, int dims) {
  std::vector<double> box;
  for (int d = 0; d < dims && draw.chance(60); ++d) box.push_back(draw.chance(30) ? 0 : 1.25);
  return box.size() == static_cast<std::size_t>(dims) ? box : std::vector<double>();
}

class CloudEdges : public ::testing::TestWithParam<int> {};

TEST_P(CloudEdges, AreThoseOfOneProcess) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < 20; ++n) {
      Draw draw(n * 41 + static_cast<std::uint64_t>(ranks));
      const int dims = draw.between(1, 3), count = draw.between(1, 4);
      const Cloud points(draw, ranks, dims, 4), queries(draw, ranks, dims, 0);
      const auto box = draw_box(draw, dims);
      const double radius = 0.125 * draw.between(0, 6);
      const OwnedRows rows = points.rows(mesh), others = queries.rows(mesh);
      const std::string what = concat("case ", n);
      expect_edges(edges_within(rows, points.own(rows), radius, box, true),
                   points_within(points.all(), points.all(), dims, radius, box), box, what);
      const auto without = edges_within(rows, points.own(rows), radius, box);
      EXPECT_FALSE(
          full_tensor(without.edges[0].eq(without.edges[1]).logical_and(without.shift.eq(0).all(1)))
              .any()
              .item<bool>());
      const auto nearest =
          nearest_edges(rows, points.own(rows), others, queries.own(others), count, box);
      expect_edges(nearest, nearest_points(points.all(), queries.all(), dims, count, box), box,
                   what);
      // Interpolation: the value of the nearest point, where the queries are.
      const at::Tensor values = rows.shard(points.own(rows).sin());
      const auto one = nearest_edges(rows, points.own(rows), others, queries.own(others), 1, box);
      const at::Tensor there = values.index_select(0, one.edges[0]);
      EXPECT_EQ(spec(there).sizes().at(0), others.sizes());
      const Neighbors near = nearest_points(points.all(), queries.all(), dims, 1, box);
      EXPECT_TRUE(full_tensor(there).equal(
          points.places.sin().index_select(0, at::tensor(near.point, at::kLong))));
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// Energies of distances in a periodic box: forces are those of one process, and sum to nothing.
TEST_P(CloudEdges, GiveForcesThatAreConserved) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    Draw draw(static_cast<std::uint64_t>(ranks));
    Cloud cloud(draw, ranks, 3, 12);
    const std::vector<double> box{1, 1, 1};
    const auto energy = [](const at::Tensor& x, const at::Tensor& edges, const at::Tensor& shift) {
      const at::Tensor apart =
          x.index_select(0, edges.select(0, 0)) + shift - x.index_select(0, edges.select(0, 1));
      return apart.square().sum(1).add(0.1).sqrt().neg().exp().sum();
    };
    const OwnedRows rows = cloud.rows(mesh);
    const auto [edges, shift] = edges_within(rows, cloud.own(rows), 0.7, box);
    const at::Tensor x = rows.shard(cloud.own(rows)).requires_grad_(true);
    const at::Tensor forces = full_tensor(torch::autograd::grad({energy(x, edges, shift)}, {x})[0]);
    const at::Tensor whole = cloud.places.clone().requires_grad_(true);
    const at::Tensor expected =
        torch::autograd::grad({energy(whole, full_tensor(edges), full_tensor(shift))}, {whole})[0];
    EXPECT_LT(difference(forces, expected), 1e-13);
    EXPECT_LT(forces.sum(0).abs().max().item<double>(), 1e-13);
  });
}

TEST_P(CloudEdges, OfWrongPlacesAreRefusedOnEveryRank) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    const std::int64_t me = manager.rank();
    const OwnedRows rows(mesh, Ids{me});
    const at::Tensor place = at::ones({1, 2}, at::kDouble);
    const bool last = me == ranks - 1;
    EXPECT_THROW(edges_within(rows, last ? at::ones({2, 2}) : place, 1), InvalidArgument);
    EXPECT_THROW(edges_within(rows, last ? place.to(at::kLong) : place, 1), InvalidArgument);
    EXPECT_THROW(edges_within(rows, last ? place * NAN : place, 1), InvalidArgument);
    EXPECT_THROW(edges_within(rows, place, -1), InvalidArgument);
    EXPECT_THROW(edges_within(rows, place, 1, {1}), InvalidArgument);
    EXPECT_THROW(nearest_edges(rows, place, rows, place, 0), InvalidArgument);
    EXPECT_THROW(nearest_edges(rows, place, rows, place, ranks + 1), InvalidArgument);
    EXPECT_NO_THROW(nearest_edges(rows, place, rows, place, ranks));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CloudEdges, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::neighbor_edges_test
