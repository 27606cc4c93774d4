// Rows divided anew by their costs: each keeps its id and its values, and the imbalance falls.

#include "tessera/ops/ghosts/rebalance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"
#include "tessera/partition/partitioners.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::rebalance_test {
namespace {

// What a row of each dtype and shape holds, by id.
at::Tensor values_of(const Ids& ids, at::ScalarType type, const Shape& row) {
  at::Tensor values = index_of(ids).remainder(97).to(type);
  Shape per_row(row.size() + 1, 1), all = with_rows(static_cast<std::int64_t>(ids.size()), row);
  per_row[0] = all[0];
  return values.view(per_row).expand(all).contiguous();
}

// True if one process, which has all rows in the order of their numbers, puts just these into one
// part.
bool is_a_part(const Ids& ids, const Cut& cut, const at::Tensor& places, const at::Tensor& costs,
               RebalanceOptions::By by) {
  Ids order;
  for (const Ids& owned : cut.owned) order.insert(order.end(), owned.begin(), owned.end());
  const auto spanned = [](const at::Tensor& t) {
    return std::span(t.const_data_ptr<double>(), static_cast<std::size_t>(t.numel()));
  };
  const at::Tensor by_number = index_of(order), at = places.index_select(0, by_number),
                   cost = costs.index_select(0, by_number);
  const int ranks = static_cast<int>(cut.owned.size());
  const auto part = by == RebalanceOptions::By::curve
                        ? partition_along_curve(spanned(at), 2, ranks, spanned(cost))
                        : bisect_points(spanned(at), 2, ranks, spanned(cost));
  std::vector<std::set<std::int64_t>> parts(cut.owned.size());
  for (std::size_t i = 0; i < part.size(); ++i) parts[part[i]].insert(cut.id[order[i]]);
  return std::ranges::count(parts, std::set<std::int64_t>(ids.begin(), ids.end())) > 0;
}

class Rebalance : public ::testing::TestWithParam<int> {};

TEST_P(Rebalance, KeepsIdsAndValuesAndIsNoWorse) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    for (std::uint64_t n = 0; n < (process() ? 6 : 30); ++n) {
      Draw draw(n * 71 + static_cast<std::uint64_t>(ranks));
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const Cut cut(draw, ranks, 40);
      const int me = mesh.all().rank();
      const auto count = static_cast<std::int64_t>(cut.id.size());
      if (count == 0) continue;
      const Ids own = cut.ids(cut.owned[me]);
      seed(n);
      // Many at one place, and some that cost nothing, in some cases.
      const at::Tensor drawn = rand({count, 2}, at::kDouble),
                       places = draw.chance(30) ? drawn.mul(2).floor() : drawn,
                       costs = (rand({count}, at::kDouble) - (draw.chance(30) ? 0.3 : -0.01))
                                   .clamp_min(0)
                                   .index_fill(0, at::zeros({1}, at::kLong), 0.5);
      const at::Tensor mine = index_of(cut.owned[me]);
      const OwnedRows rows(mesh, own);
      const Shape row = draw_row(draw);
      const auto of = [&](at::ScalarType type) { return rows.shard(values_of(own, type, row)); };
      const bool by_rank = draw.chance(30);
      const at::Tensor here = costs.index_select(0, mine);
      RebalanceOptions options;
      if (draw.chance(50)) options.by = RebalanceOptions::By::bisection;
      options.tolerance = 1;
      Graph graph(draw, count);
      Ids source, target;
      for (std::size_t e = 0; e < graph.source.size(); ++e) {
        if (static_cast<int>(e) % ranks != me) continue;
        source.push_back(cut.id[graph.source[e]]);
        target.push_back(cut.id[graph.target[e]]);
      }
      options.edges = rows.edges(source, target, true);
      const Rebalanced to = rebalance(rows, places.index_select(0, mine),
                                      by_rank ? here.sum() : here, {of(at::kDouble)}, options);
      EXPECT_EQ(to.rows.size(), count);
      EXPECT_LE(to.imbalance_after, to.imbalance_before) << to.summary();
      // Costs as measured anew at the new owners.
      if (!by_rank) {
        std::map<std::int64_t, double> cost_of;
        for (std::int64_t i = 0; i < count; ++i) cost_of[cut.id[i]] = costs[i].item<double>();
        at::Tensor sum = at::zeros({1}, at::kDouble), most = sum.clone();
        for (const auto id : to.rows.ids()) most += cost_of.at(id);
        sum += most;
        mesh.all().all_reduce(sum);
        mesh.all().all_reduce(most, ReduceOp::max);
        EXPECT_NEAR((most * ranks / sum).item<double>(), to.imbalance_after, 1e-9);
        const double heaviest = costs.max().item<double>() * ranks / sum.item<double>();
        EXPECT_LE(to.imbalance_after, 1 + 3 * heaviest) << to.summary();
        EXPECT_TRUE(to.rows_moved == 0 || is_a_part(to.rows.ids(), cut, places, costs, options.by));
      }
      for (const auto type : {at::kDouble, at::kLong, at::kBool, at::kBFloat16}) {
        const at::Tensor moved = type == at::kDouble ? to.moved.at(0) : to.move(of(type));
        EXPECT_TRUE(to_local(moved).equal(values_of(to.rows.ids(), type, row))) << type;
      }
      ASSERT_TRUE(to.quality_before && to.quality_after);
      EXPECT_EQ(to.quality_before->edges, static_cast<std::int64_t>(graph.source.size()));
      EXPECT_EQ(to.quality_before->sizes, rows.sizes());
      EXPECT_EQ(to.quality_after->sizes, to.rows.sizes());
      // A second time nothing is to be gained.
      const at::Tensor again = to_local(to.move(rows.shard(places.index_select(0, mine))));
      const at::Tensor cost = to_local(to.move(rows.shard(here)));
      const Rebalanced next = rebalance(to.rows, again, cost, {}, {.tolerance = 1e6});
      EXPECT_EQ(next.rows_moved, 0);
      EXPECT_EQ(next.rows.ids(), to.rows.ids());
      if (::testing::Test::HasFailure()) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Rebalance, ::testing::Values(1, 2, 3, 4));

// Ranks that hold the same rows divide alike, whatever each has measured.
TEST(Rebalanced, IsTheSameBesideOtherAxes) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"copies", 2}, {"domain", 2}});
    const std::int64_t me = mesh.coordinate()[1];
    const Ids own = me == 0 ? Ids{0, 1, 2, 3, 4, 5} : Ids{6};
    const OwnedRows rows(mesh, {1}, own);
    const at::Tensor line = index_of(own).to(at::kDouble).unsqueeze(1);
    const at::Tensor costs =
        at::ones({static_cast<std::int64_t>(own.size())}) * (1 + manager.rank());
    const Rebalanced to = rebalance(rows, line, costs, {rows.shard(line)});
    EXPECT_GT(to.rows_moved, 0) << to.summary();
    EXPECT_EQ(full_tensor(to.moved[0]).numel(), 7);
    const at::Tensor sizes = torch::tensor(to.rows.sizes(), at::kLong);
    at::Tensor most = sizes.clone();
    mesh.all().all_reduce(most, ReduceOp::max);
    EXPECT_TRUE(most.equal(sizes)) << to.summary();
    const std::string text = thrown<InvalidArgument>(
        [&] { rebalance(rows, line, manager.rank() == 3 ? -costs : costs); });
    EXPECT_NE(text.find("a row that costs"), std::string::npos) << text;
  });
}

// What a rank sends and receives does not grow with the ranks, where each has as many rows.
TEST(Rebalanced, MovesNoMoreOnMoreRanks) {
  std::map<int, std::int64_t> bytes_on;
  for (const int ranks : {2, 6}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"domain", ranks}});
      const std::int64_t own = 20000, first = manager.rank() * own;
      const at::Tensor ids = at::arange(first, first + own);
      const OwnedRows rows(mesh, std::span(ids.const_data_ptr<std::int64_t>(), own));
      const at::Tensor costs = at::ones({own}, at::kDouble);
      if (manager.rank() == 0) costs[0] = 40;  // so that some move
      CommTraceScope trace(mesh.all());
      const Rebalanced to =
          rebalance(rows, ids.to(at::kDouble).unsqueeze(1), costs, {}, {.tolerance = 1});
      EXPECT_GT(to.rows_moved, 0);
      std::int64_t bytes = 0;
      for (const CommSummary& call : trace->summary()) bytes += call.bytes;
      if (manager.rank() == 1) bytes_on[ranks] = bytes;
    });
  }
  if (process()) return;  // of threads alone
  EXPECT_LT(bytes_on[6], bytes_on[2] * 9 / 5) << bytes_on[2];
}

TEST(Rebalanced, IsRefusedOnEveryRankForWhatOneMeasuresWrongly) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const int me = manager.rank();
    // The last has no rows.
    const Ids own = me == 2 ? Ids{} : Ids{2 * me, 2 * me + 1};
    const OwnedRows rows(mesh, own);
    const auto count = static_cast<std::int64_t>(own.size());
    const at::Tensor places = at::ones({count, 2}), costs = at::ones({count});
    const double nan = std::nan("");
    const auto refused = [&](const std::string& part, const at::Tensor& at,
                             const at::Tensor& cost) {
      const std::string text = thrown<InvalidArgument>([&] { rebalance(rows, at, cost); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    refused("rank 1: a row that costs nan", places, me == 1 ? costs * nan : costs);
    refused("rank 0: a row that costs -1", places, me == 0 ? -costs : costs);
    refused("rank 2: a row that costs -3", places, at::scalar_tensor(me == 2 ? -3.0 : 1.0));
    refused("rank 1: a row that costs inf", places, me == 1 ? costs / 0 : costs);
    refused("rank 1: a place at nan", me == 1 ? places * nan : places, costs);
    refused("rank 1: places of shape [2, 2]", me == 1 ? places.to(at::kLong) : places, costs);
    refused("a curve through 9 dims", at::ones({count, 9}), costs);
    // All at one place, and all cost on one rank: the rows' numbers divide them.
    const Rebalanced to = rebalance(rows, places, costs);
    EXPECT_EQ(to.imbalance_after, 1.5) << to.summary();
  });
}

// Rows with a parameter of their own, by Adam, go on as on one process.
TEST(Rebalanced, GoesOnWithItsOptimizer) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const int me = manager.rank();
    seed(4);
    const at::Tensor start = randn({9, 2}, at::kDouble), aim = randn({9, 2}, at::kDouble);
    const auto adam = [](const at::Tensor& parameter) {
      return torch::optim::Adam(std::vector<at::Tensor>{parameter}, torch::optim::AdamOptions(0.1));
    };
    const auto steps = [](torch::optim::Adam& optimizer, const at::Tensor& x, const at::Tensor& y) {
      for (int k = 0; k < 3; ++k) {
        optimizer.zero_grad();
        (x - y).square().sum().backward();
        optimizer.step();
      }
    };
    at::Tensor whole = start.clone().requires_grad_(true);
    auto expected = adam(whole);
    steps(expected, whole, aim);
    steps(expected, whole, aim);

    // Rank 0 has seven rows, the others one each.
    Ids own;
    for (std::int64_t id = 0; id < 9; ++id)
      if ((id < 7 ? 0 : id - 6) == me) own.push_back(id);
    OwnedRows rows(mesh, own);
    const auto of = [&](const at::Tensor& t) {
      return rows.shard(t.index_select(0, index_of(own)));
    };
    at::Tensor x = of(start).requires_grad_(true);
    auto before = adam(x);
    steps(before, x, of(aim));
    auto& state =
        static_cast<torch::optim::AdamParamState&>(*before.state().at(x.unsafeGetTensorImpl()));
    const at::Tensor line = index_of(own).to(at::kDouble).unsqueeze(1);
    const Rebalanced to = rebalance(rows, line, torch::tensor(static_cast<double>(own.size())),
                                    {x, of(aim), state.exp_avg(), state.exp_avg_sq()});
    EXPECT_EQ(to.rows.sizes(), (Sizes{3, 3, 3})) << to.summary();
    EXPECT_EQ(to.summary(), "imbalance of costs 2.33 -> 1.00; 5 of 9 rows moved\n");
    at::Tensor y = to.moved[0];
    EXPECT_TRUE(y.is_leaf() && y.requires_grad());
    auto after = adam(y);
    auto next = std::make_unique<torch::optim::AdamParamState>();
    next->step(state.step());
    next->exp_avg(to.moved[2]);
    next->exp_avg_sq(to.moved[3]);
    after.state()[y.unsafeGetTensorImpl()] = std::move(next);
    steps(after, y, to.moved[1]);
    EXPECT_LT(
        difference(to_local(y).detach(), whole.detach().index_select(0, index_of(to.rows.ids()))),
        1e-13);

    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      const std::string text = thrown<InvalidArgument>(call);
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    const at::Tensor ones = at::ones({static_cast<std::int64_t>(own.size())});
    refused("rank 1: places of shape [4, 1]",
            [&] { rebalance(rows, me == 1 ? at::zeros({4, 1}) : line, ones); });
    refused("costs of shape [2]", [&] { rebalance(rows, line, me == 2 ? at::ones({2}) : ones); });
    refused("a row that costs -1", [&] { rebalance(rows, line, -ones); });
    refused("no row costs anything", [&] { rebalance(rows, line, 0 * ones); });
    refused("places of 1 dims",
            [&] { rebalance(rows, me == 2 ? line.expand({-1, 2}) : line, ones); });
    refused("give at least 1", [&] { rebalance(rows, line, ones, {}, {.tolerance = 0.5}); });
    refused("not sharded along dim 0", [&] { to.move(y); });
    refused("not sharded along dim 0", [&] { to.move(ones); });
  });
}

}  // namespace
}  // namespace tessera::test::rebalance_test
