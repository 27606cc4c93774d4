// Ghosts of arrays that are divided by a table of owners: values, gradients and second derivatives
// beside one process, which holds everything.

#include "tessera/ops/ghosts/ghost_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test::ghosts_test {
namespace {

double sum_over_ranks(const DeviceMesh& mesh, const at::Tensor& t) {
  const at::Tensor sum = t.detach().sum().to(at::kDouble).clone();
  mesh.all().all_reduce(sum);
  return sum.item<double>();
}

// The gradient of `of` by `by`, and that of its square's sum.
Values two_derivatives(const at::Tensor& of, const at::Tensor& by) {
  const at::Tensor first = torch::autograd::grad({of}, {by}, {}, true, true)[0];
  return {first, torch::autograd::grad({first.square().sum()}, {by})[0]};
}

void check_exchange(const DeviceMesh& mesh, const Cut& cut, const Shape& row, std::uint64_t n) {
  const int me = mesh.all().rank(), ranks = mesh.all().size();
  seed(n);
  const at::Tensor whole =
      randn(with_rows(static_cast<std::int64_t>(cut.id.size()), row), at::kDouble)
          .requires_grad_(true);
  const at::Tensor mine =
      whole.detach().index_select(0, index_of(cut.owned[me])).requires_grad_(true);
  Values weights, expected;
  at::Tensor energy = at::zeros({}, at::kDouble);
  for (int r = 0; r < ranks; ++r) {
    expected.push_back(whole.index_select(0, index_of(cut.local(r))));
    weights.push_back(randn(expected[r].sizes(), at::kDouble));
    energy = energy + (expected[r].pow(3) * weights[r]).sum();
  }
  const GhostPlan plan = cut.plan(mesh);
  CommTraceScope trace(mesh.all());
  const at::Tensor got = ghost_exchange(plan, mine);
  EXPECT_TRUE(got.equal(expected[me])) << plan.summary();
  std::int64_t bytes = 0;
  for (const CommSummary& call : trace->summary()) bytes += call.bytes;
  // A trace counts what is sent and what is received.
  const std::int64_t width =
      8 * std::accumulate(row.begin(), row.end(), std::int64_t{1}, std::multiplies<>());
  EXPECT_EQ(bytes,
            width * static_cast<std::int64_t>(plan.rows().sent.size() + cut.ghosts[me].size()));

  const Values there = two_derivatives(energy, whole);
  const Values here = two_derivatives((got.pow(3) * weights[me]).sum(), mine);
  for (int k = 0; k < 2; ++k)
    EXPECT_LT(difference(here[k], there[k].index_select(0, index_of(cut.owned[me]))), 1e-12)
        << "derivative " << k + 1 << '\n'
        << plan.summary();
  // <E x, y> = <x, E' y>
  const at::Tensor& y = weights[me];
  EXPECT_NEAR(sum_over_ranks(mesh, got * y), sum_over_ranks(mesh, mine * ghost_reduce(plan, y)),
              1e-11);
}

// Each owned row with all copies of it reduced to one, on one process.
at::Tensor reduced(const at::Tensor& all, const Ids& row_of, std::int64_t rows, ReduceOp op) {
  if (op == ReduceOp::sum)
    return at::zeros(with_rows(rows, all.sizes().slice(1).vec()), all.options())
        .index_add(0, index_of(row_of), all);
  Shape index_shape(static_cast<std::size_t>(all.dim()), 1);
  index_shape[0] = all.size(0);
  const at::Tensor index = index_of(row_of).view(index_shape).expand_as(all);
  return at::zeros(with_rows(rows, all.sizes().slice(1).vec()), all.options())
      .scatter_reduce(0, index, all, op == ReduceOp::max ? "amax" : "amin", false);
}

void check_reduce(const DeviceMesh& mesh, const Cut& cut, const Shape& row, std::uint64_t n,
                  ReduceOp op) {
  const int me = mesh.all().rank(), ranks = mesh.all().size();
  const std::string how = to_string(op.kind);
  seed(n);
  Ids row_of;
  Values parts;
  std::int64_t begin = 0;
  for (int r = 0; r < ranks; ++r) {
    const Ids local = cut.local(r);
    if (r < me) begin += static_cast<std::int64_t>(local.size());
    row_of.insert(row_of.end(), local.begin(), local.end());
    // Few different values, so that some are equal.
    parts.push_back(randn(with_rows(static_cast<std::int64_t>(local.size()), row), at::kDouble)
                        .mul(2)
                        .round()
                        .div(2));
  }
  const at::Tensor all = at::cat(parts).requires_grad_(true);
  const at::Tensor mine = parts[me].clone().requires_grad_(true);
  const auto rows = static_cast<std::int64_t>(cut.id.size());
  const at::Tensor expected = reduced(all, row_of, rows, op);
  const at::Tensor weight = randn(expected.sizes(), at::kDouble);
  const at::Tensor own = index_of(cut.owned[me]);
  const GhostPlan plan = cut.plan(mesh);
  const at::Tensor got = ghost_reduce(plan, mine, op);
  EXPECT_LT(difference(got, expected.index_select(0, own)), 1e-14) << how;
  const Values there = two_derivatives((expected.pow(3) * weight).sum(), all);
  const Values here = two_derivatives((got.pow(3) * weight.index_select(0, own)).sum(), mine);
  for (int k = 0; k < 2; ++k)
    EXPECT_LT(difference(here[k], there[k].narrow(0, begin, mine.size(0))), 1e-12)
        << how << ", derivative " << k + 1 << '\n'
        << plan.summary();
}

class Ghosts : public ::testing::TestWithParam<int> {};

TEST_P(Ghosts, AreTheRowsOfOneProcessInValueAndTwoDerivatives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 15 : 80); ++n) {
      Draw draw(n * 211 + static_cast<std::uint64_t>(ranks));
      const Cut cut(draw, ranks);
      check_exchange(manager.mesh(draw.mesh(ranks)), cut, draw_row(draw), n);
      if (::testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(Ghosts, AreReducedIntoTheirOwnersInValueAndTwoDerivatives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 9 : 40); ++n) {
      Draw draw(n * 307 + static_cast<std::uint64_t>(ranks));
      const Cut cut(draw, ranks);
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const Shape row = draw_row(draw);
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max})
        check_reduce(mesh, cut, row, n, op);
      if (::testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(Ghosts, HaveAnyDtypeAndAnyStrides) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    Draw draw(static_cast<std::uint64_t>(ranks));
    const Cut cut(draw, ranks, 40, 30);
    const int me = manager.rank();
    const GhostPlan plan = cut.plan(mesh);
    const auto rows = static_cast<std::int64_t>(cut.id.size());
    seed(5);
    const at::Tensor base = randint(5, {rows, 3, 2});
    for (const auto type :
         {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble,
          at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
      at::Tensor whole = base.to(type);
      if (whole.is_complex()) whole = whole * c10::complex<double>(1, 2);
      const at::Tensor mine = whole.index_select(0, index_of(cut.owned[me]));
      // Transposed, as a slice, and conjugated where it can be.
      at::Tensor strided = at::empty({2, 3, mine.size(0) + 1}, mine.options());
      strided = strided.permute({2, 1, 0}).narrow(0, 1, mine.size(0));
      strided.copy_(mine);
      if (whole.is_complex()) strided = strided.conj().clone().conj();
      const at::Tensor got = ghost_exchange(plan, strided);
      EXPECT_TRUE(got.equal(whole.index_select(0, index_of(cut.local(me))))) << type;
      EXPECT_TRUE(got.is_contiguous());
      EXPECT_FALSE(got.requires_grad());
      if (type == at::kBool) continue;
      // Small whole numbers: so many times the row, in every dtype.
      const at::Tensor times =
          cut.copies(at::kLong).index_select(0, index_of(cut.owned[me])).view({-1, 1, 1});
      EXPECT_TRUE(ghost_reduce(plan, got).equal((mine * times.to(type)).to(type))) << type;
      if (!whole.is_complex()) {
        EXPECT_TRUE(ghost_reduce(plan, got, ReduceOp::max).equal(mine)) << type;
      }
    }
  });
}

// The owned row first, then ranks in ascending order and the ghosts of each in its order.
TEST_P(Ghosts, AreSummedInOneOrderToTheBit) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    const int me = manager.rank();
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      Draw draw(7);
      const Cut cut(draw, ranks, 14, 60);
      seed(9);
      Values parts;
      for (int r = 0; r < ranks; ++r) {
        const auto rows = static_cast<std::int64_t>(cut.local(r).size());
        parts.push_back((randn({rows, 5}) * randn({rows, 5}).exp()).to(type));
      }
      at::Tensor sums = at::zeros({static_cast<std::int64_t>(cut.id.size()), 5}, at::kFloat);
      for (int r = 0; r < ranks; ++r)
        for (std::size_t i = 0; i < cut.owned[r].size(); ++i)
          sums[cut.owned[r][i]].copy_(parts[r][static_cast<std::int64_t>(i)]);
      for (int r = 0; r < ranks; ++r)
        for (std::size_t g = 0; g < cut.ghosts[r].size(); ++g)
          sums[cut.ghosts[r][g]].add_(
              parts[r][static_cast<std::int64_t>(cut.owned[r].size() + g)].to(at::kFloat));
      const at::Tensor expected = sums.index_select(0, index_of(cut.owned[me])).to(type);
      const GhostPlan plan = cut.plan(mesh);
      for (int again = 0; again < 3; ++again)
        EXPECT_TRUE(ghost_reduce(plan, parts[me]).equal(expected)) << type;
    }
  });
}

TEST_P(Ghosts, SeveralExchangesAreInProgressAtOnce) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    Draw draw(17);
    const Cut cut(draw, ranks, 30, 20);
    const int me = manager.rank();
    const GhostPlan plan = cut.plan(mesh);
    seed(3);
    const auto rows = static_cast<std::int64_t>(cut.id.size());
    const at::Tensor whole = randn({rows, 2}, at::kDouble).requires_grad_(true);
    for (int round = 0; round < 3; ++round) {
      const at::Tensor mine =
          whole.detach().index_select(0, index_of(cut.owned[me])).requires_grad_(true);
      auto first = start_ghost_exchange(plan, mine);
      auto second = start_ghost_exchange(plan, mine.detach().to(at::kFloat));
      const at::Tensor interior = mine.square();  // while both are in progress
      const at::Tensor b = second.wait(), a = first.wait();
      auto back = start_ghost_reduce(plan, a);
      {
        auto dropped = start_ghost_reduce(plan, b);
      }  // waited for
      const at::Tensor c = back.wait();
      const at::Tensor all = whole.detach().index_select(0, index_of(cut.local(me)));
      EXPECT_TRUE(a.equal(all));
      EXPECT_TRUE(b.equal(all.to(at::kFloat)));
      (c.sum() + interior.sum()).backward();
      const at::Tensor copies =
          cut.copies(at::kDouble).index_select(0, index_of(cut.owned[me])).view({-1, 1});
      const at::Tensor expected = copies + 2 * mine.detach();
      EXPECT_LT(difference(mine.grad(), expected), 1e-14);
    }
  });
}

// A network on a drawn graph: messages along edges, summed at their targets, several layers; with
// an energy and its forces, which are trained. `exchanged(h)`: the rows in which edges' sources
// count; `targets`: rows of the nodes themselves.
at::Tensor energies(at::Tensor positions, const Values& weights, const at::Tensor& sources,
                    const at::Tensor& targets,
                    const std::function<at::Tensor(const at::Tensor&)>& exchanged) {
  at::Tensor h = positions;
  for (const at::Tensor& w : weights) {
    const at::Tensor all = exchanged(h);
    const at::Tensor from = all.index_select(0, sources), to = h.index_select(0, targets);
    const at::Tensor message = at::tanh(at::cat({from, to, from - to}, 1).matmul(w));
    h = h + at::zeros_like(h).index_add(0, targets, message);
  }
  return h.square().sum(1);
}

void check_network(const DeviceMesh& mesh, Draw& draw, std::uint64_t n) {
  const int me = mesh.all().rank(), ranks = mesh.all().size();
  Cut cut(draw, ranks);
  const auto nodes = static_cast<std::int64_t>(cut.id.size());
  const Graph graph(draw, nodes);
  // An edge is its target's owner's.
  Ids sources, targets;
  for (std::size_t e = 0; e < graph.source.size(); ++e) {
    if (std::ranges::find(cut.owned[me], graph.target[e]) == cut.owned[me].end()) continue;
    sources.push_back(graph.source[e]);
    targets.push_back(graph.target[e]);
  }
  const Ids ghosts = ghosts_of(cut.owned[me], sources);
  const GhostPlan plan(mesh, cut.ids(cut.owned[me]), cut.ids(ghosts));

  seed(n);
  const at::Tensor whole = randn({nodes, 3}, at::kDouble).requires_grad_(true);
  Values weights, weights_here;
  for (int layer = draw.between(1, 3); layer > 0; --layer) {
    weights.push_back((0.4 * randn({9, 3}, at::kDouble)).requires_grad_(true));
    weights_here.push_back(weights.back().detach().clone().requires_grad_(true));
  }
  const auto loss_of = [](const at::Tensor& energy, const at::Tensor& positions) {
    const at::Tensor forces =
        -torch::autograd::grad({energy.sum()}, {positions}, {}, true, true)[0];
    return std::make_pair(energy.square().sum() + forces.pow(2).sum() + forces.pow(3).sum(),
                          forces);
  };
  const auto [loss, forces] =
      loss_of(energies(whole, weights, index_of(graph.source), index_of(graph.target),
                       [](const at::Tensor& h) { return h; }),
              whole);
  loss.backward();

  const at::Tensor own = index_of(cut.owned[me]);
  const at::Tensor mine = whole.detach().index_select(0, own).requires_grad_(true);
  const auto [loss_here, forces_here] =
      loss_of(energies(mine, weights_here, index_of(local_rows(cut.owned[me], ghosts, sources)),
                       index_of(local_rows(cut.owned[me], ghosts, targets)),
                       [&](const at::Tensor& h) { return ghost_exchange(plan, h); }),
              mine);
  loss_here.backward();
  EXPECT_LT(difference(forces_here, forces.index_select(0, own)), 1e-11);
  EXPECT_LT(difference(mine.grad(), whole.grad().index_select(0, own)), 1e-10);
  EXPECT_NEAR(sum_over_ranks(mesh, loss_here), loss.item<double>(),
              1e-11 * (1 + std::abs(loss.item<double>())));
  for (std::size_t k = 0; k < weights.size(); ++k) {
    at::Tensor sum = weights_here[k].grad().clone();
    mesh.all().all_reduce(sum);
    EXPECT_LT(difference(sum, weights[k].grad(), 1e-6), 1e-10) << "weight " << k;
  }
}

TEST_P(Ghosts, CarryANetworkWhoseForcesAreTrained) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 6 : 30); ++n) {
      Draw draw(n * 97 + static_cast<std::uint64_t>(ranks));
      check_network(manager.mesh(draw.mesh(ranks)), draw, n);
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// Along a line in space: central differences of the ranks' total, once and of its slope.
TEST_P(Ghosts, GradientsAreSlopesByDifferences) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    Draw draw(23);
    const Cut cut(draw, ranks, 30, 20);
    const GhostPlan plan = cut.plan(mesh);
    const auto owned = static_cast<std::int64_t>(cut.owned[manager.rank()].size());
    seed(static_cast<std::uint64_t>(manager.rank()) + 31);
    const at::Tensor x = randn({owned, 2}, at::kDouble).requires_grad_(true);
    const at::Tensor along = randn({owned, 2}, at::kDouble);
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
      const auto energy = [&](const at::Tensor& at) {
        return ghost_reduce(plan, ghost_exchange(plan, at).sin(), op).pow(3).sum();
      };
      const auto slope = [&](const at::Tensor& at) {
        return (torch::autograd::grad({energy(at)}, {at}, {}, true, true)[0] * along).sum();
      };
      constexpr double h = 1e-5;
      const auto moved = [&](double by) { return (x.detach() + by * along).requires_grad_(true); };
      const double first =
          (sum_over_ranks(mesh, energy(moved(h))) - sum_over_ranks(mesh, energy(moved(-h)))) /
          (2 * h);
      EXPECT_NEAR(sum_over_ranks(mesh, slope(x)), first, 1e-6 * (1 + std::abs(first)));
      const double second =
          (sum_over_ranks(mesh, slope(moved(h))) - sum_over_ranks(mesh, slope(moved(-h)))) /
          (2 * h);
      const at::Tensor curvature = torch::autograd::grad({slope(x)}, {x})[0] * along;
      EXPECT_NEAR(sum_over_ranks(mesh, curvature), second, 1e-5 * (1 + std::abs(second)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Ghosts, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::ghosts_test
