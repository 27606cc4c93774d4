// Ghosts by a user's own exchange, and ghosts of several layers: values, gradients and second
// derivatives beside one process.

#include "tessera/ops/ghosts/ghost_layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"
#include "tessera/ops/ghosts/ghost_transport.h"

namespace tessera::test::ghost_layers_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// An engine's communication, which knows the whole partition and sends everything to all.
struct Engine {
  Engine(const Cut& of, Group over) : cut(of), group(std::move(over)), me(group.rank()) {
    Ids at(cut.id.size());
    for (const Ids& rows : cut.owned) {
      sizes.push_back(static_cast<std::int64_t>(rows.size()));
      if (static_cast<int>(sizes.size()) <= me) begin += sizes.back();
      for (const auto row : rows) at[row] = all++;
    }
    for (const auto row : cut.ghosts[me]) from.push_back(at[row]);
  }
  std::int64_t own() const { return sizes[me]; }
  std::int64_t ghosts() const { return static_cast<std::int64_t>(from.size()); }
  void forward(const at::Tensor& rows) const {
    at::Tensor everything = at::empty(with_rows(all, rows.sizes().slice(1).vec()), rows.options());
    group.all_gather(everything, rows.narrow(0, 0, own()).contiguous(), sizes);
    rows.narrow(0, own(), ghosts()).copy_(everything.index_select(0, index_of(from)));
    ++calls;
  }
  void reverse(const at::Tensor& rows) const {
    at::Tensor everything = at::zeros(with_rows(all, rows.sizes().slice(1).vec()), rows.options());
    everything.index_add_(0, index_of(from), rows.narrow(0, own(), ghosts()));
    group.all_reduce(everything);
    rows.narrow(0, 0, own()).add_(everything.narrow(0, begin, own()));
    ++calls;
  }
  GhostTransport transport() const {
    return {[this](const at::Tensor& rows) { forward(rows); },
            [this](const at::Tensor& rows) { reverse(rows); },
            {at::kDouble, at::kFloat, at::kLong}};
  }
  GhostPlan plan(const DeviceMesh& mesh) const {
    return plan_over(transport(), mesh, cut.ids(cut.owned[me]), cut.ids(cut.ghosts[me]));
  }
  const Cut& cut;
  const Group group;
  const int me;
  Sizes sizes;
  std::int64_t begin = 0, all = 0;
  Ids from;
  mutable int calls = 0;
};

class GhostTransports : public ::testing::TestWithParam<int> {};

// The gradient and its gradient of an exchange and a sum.
Values through(const GhostPlan& plan, const at::Tensor& value) {
  const at::Tensor x = value.clone().requires_grad_(true);
  const at::Tensor h = ghost_exchange(plan, x), y = ghost_reduce(plan, h.pow(3));
  const at::Tensor first = torch::autograd::grad({y.square().sum()}, {x}, {}, true, true)[0];
  return {h, y, ghost_reduce(plan, h, ReduceOp::max), first,
          torch::autograd::grad({first.sin().sum()}, {x})[0]};
}

TEST_P(GhostTransports, GiveWhatOurExchangeGives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 6 : 24); ++n) {
      Draw draw(n * 61 + static_cast<std::uint64_t>(ranks));
      manager.set_check_level(n % 2 == 0 ? CheckLevel::collective : CheckLevel::local);
      const Cut cut(draw, ranks);
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const Engine engine(cut, mesh.all());
      const GhostPlan ours = cut.plan(mesh), theirs = engine.plan(mesh);
      EXPECT_EQ(ours.rows(), theirs.rows());
      const Shape row = draw_row(draw);
      seed(n + 7 * static_cast<std::uint64_t>(manager.rank()));
      const at::Tensor x = randn(with_rows(engine.own(), row), at::kDouble);
      const Values expected = through(ours, x), got = through(theirs, x);
      for (std::size_t k = 0; k < got.size(); ++k)
        EXPECT_LT(difference(got[k], expected[k]), 1e-10) << "value " << k << ", case " << n;
      EXPECT_GE(engine.calls, 4);
      const int calls = engine.calls;
      start_ghost_reduce(theirs, got[0], ReduceOp::min).wait();
      EXPECT_EQ(engine.calls, calls) << "extremes are ours";
      for (const auto type : {at::kFloat, at::kLong}) {
        const at::Tensor whole = (x * 4).to(type).transpose(0, -1).contiguous().transpose(0, -1);
        const at::Tensor h = ghost_exchange(theirs, whole);
        EXPECT_TRUE(h.equal(ghost_exchange(ours, whole)));
        EXPECT_LT(difference(ghost_reduce(theirs, h), ghost_reduce(ours, h)), 1e-4);
      }
      if (::testing::Test::HasFailure()) return;
    }
    manager.set_check_level(CheckLevel::local);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GhostTransports, ::testing::Values(1, 2, 3, 4));

// Ids 3 and 2^40 are on ranks 0 and 1, which need each other's.
struct Pair {
  explicit Pair(DistributedManager& manager)
      : mesh(manager.mesh({{"domain", 2}})), me(manager.rank()) {}
  void forward(const at::Tensor& rows) const {
    at::Tensor all = at::empty(with_rows(2, rows.sizes().slice(1).vec()), rows.options());
    mesh.all().all_gather(all, rows.narrow(0, 0, 1).contiguous());
    rows[1].copy_(all[1 - me]);
  }
  void reverse(const at::Tensor& rows) const {
    at::Tensor all = at::zeros(with_rows(2, rows.sizes().slice(1).vec()), rows.options());
    all[1 - me].copy_(rows[1]);
    mesh.all().all_reduce(all);
    rows[0].add_(all[me]);
  }
  using Step = std::function<void(const at::Tensor&)>;
  GhostPlan plan(const Step& after_forward, const Step& after_reverse = {}) const {
    const GhostTransport transport{[=, this](const at::Tensor& rows) {
                                     forward(rows);
                                     if (after_forward) after_forward(rows);
                                   },
                                   [=, this](const at::Tensor& rows) {
                                     reverse(rows);
                                     if (after_reverse) after_reverse(rows);
                                   }};
    const Ids ids{3, std::int64_t{1} << 40};
    return plan_over(transport, mesh, std::span(ids).subspan(me, 1),
                     std::span(ids).subspan(1 - me, 1));
  }
  const DeviceMesh mesh;
  const int me;
};

TEST(GhostTransport, MovesOtherRowsThanThePlanSays) {
  on_ranks(2, [](DistributedManager& manager) {
    manager.set_check_level(CheckLevel::collective);
    const Pair pair(manager);
    const int me = manager.rank();
    const at::Tensor x = at::ones({1, 3}, at::kDouble), h = at::ones({2, 3}, at::kDouble);
    // On one rank alone; told on both.
    const auto own = pair.plan([&](const at::Tensor& rows) {
      if (me == 1) rows[1].copy_(rows[0]);
    });
    std::string text = thrown<MismatchError>([&] { ghost_exchange(own, x); });
    EXPECT_TRUE(
        has(text, "On rank 1: the ghost of id 3 (row 1, owned by rank 0) got id 1099511627776"))
        << text;
    const auto nothing = pair.plan([&](const at::Tensor& rows) {
      if (me == 0) rows[1].zero_();
    });
    text = thrown<MismatchError>([&] { ghost_exchange(nothing, x); });
    EXPECT_TRUE(has(text, "the ghost of id 1099511627776 (row 1, owned by rank 1) got nothing"))
        << text;
    const auto written = pair.plan([&](const at::Tensor& rows) {
      if (me == 0) rows[0].copy_(rows[1]);
    });
    text = thrown<MismatchError>([&] { ghost_exchange(written, x); });
    EXPECT_TRUE(has(text, "id 3 (owned row 0) became id 1099511627776")) << text;
    const auto twice = pair.plan({}, [&](const at::Tensor& rows) {
      if (me == 1) rows[0].mul_(2);
    });
    EXPECT_TRUE(ghost_exchange(twice, x).equal(h));
    text = thrown<MismatchError>([&] { ghost_reduce(twice, h); });
    EXPECT_TRUE(has(text, "On rank 1: id 1099511627776 (row 0) did not get the sum")) << text;
    EXPECT_TRUE(ghost_reduce(pair.plan({}), h).equal(2 * x));
    manager.set_check_level(CheckLevel::local);
  });
}

TEST(GhostTransport, ThatThrowsOnOneRankIsLearntByAll) {
  on_ranks(2, [](DistributedManager& manager) {
    if (manager.world().backend() == "mpi") GTEST_SKIP() << "over MPI the job would end with 1";
    const Pair pair(manager);
    const int me = manager.rank();
    bool wrong = true;
    const auto plan = pair.plan([&](const at::Tensor& rows) {
      if (wrong && me == 0) throw std::runtime_error("the cable is out");
      if (wrong && me == 1 && rows.size(1) == 2) rows.resize_({5});
    });
    const at::Tensor x = at::ones({1, 3}, at::kDouble);
    std::string text;
    try {
      ghost_exchange(plan, x);
      pair.mesh.all().barrier();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& e) {
      EXPECT_EQ(dynamic_cast<const PeerFailedError*>(&e) != nullptr, me == 1);
      text = e.what();
    }
    EXPECT_TRUE(has(text, "the cable is out")) << text;
    manager.world().barrier();
    manager.set_check_level(CheckLevel::collective);
    text = thrown<Error>([&] { ghost_exchange(plan, x); });
    EXPECT_TRUE(has(text, "rank 0") && has(text, "the cable is out")) << text;
    wrong = me == 1;
    text = thrown<InvalidArgument>([&] { ghost_exchange(plan, at::ones({1, 2}, at::kDouble)); });
    EXPECT_TRUE(has(text, "rank 1") && has(text, "ones of shape [5]")) << text;
    wrong = false;
    EXPECT_TRUE(ghost_exchange(plan, x).equal(at::ones({2, 3}, at::kDouble)));
    text = thrown<InvalidArgument>([&] { ghost_exchange(plan, x.to(at::kFloat)); });
    EXPECT_TRUE(has(text, "transport carries Double")) << text;
    thrown<InvalidArgument>([&] { ghost_reduce(plan, at::ones({2, 1}, at::kLong)); });
    GhostTransport none;
    none.forward = [](const at::Tensor&) {};
    EXPECT_TRUE(has(thrown<InvalidArgument>([&] { plan_over(none, pair.mesh, Ids{}, Ids{}); }),
                    "no reverse"));
    none.reverse = none.forward;
    none.dtypes = {at::kBool};
    EXPECT_TRUE(has(thrown<InvalidArgument>([&] { plan_over(none, pair.mesh, Ids{}, Ids{}); }),
                    "transport of Bool"));
    none.dtypes = {me == 0 ? at::kFloat : at::kDouble};
    thrown<InvalidArgument>([&] { plan_over(none, pair.mesh, Ids{}, Ids{}); });
    manager.set_check_level(CheckLevel::local);
  });
}

// One layer: messages of both ends and of the edge's own values, summed at the first `rows` rows.
at::Tensor layer_of(const at::Tensor& h, const at::Tensor& e, const at::Tensor& source,
                    const at::Tensor& target, std::int64_t rows, const at::Tensor& w) {
  const at::Tensor from = h.index_select(0, source), to = h.index_select(0, target);
  const at::Tensor message = at::tanh(at::cat({from, to, e}, 1).matmul(w));
  const at::Tensor own = h.narrow(0, 0, rows);
  return own + at::zeros_like(own).index_add(0, target, message);
}

// A loss of an energy and its forces, and the forces.
std::pair<at::Tensor, at::Tensor> loss_of(const at::Tensor& h, const at::Tensor& x) {
  const at::Tensor forces = -torch::autograd::grad({h.square().sum()}, {x}, {}, true, true)[0];
  return {h.square().sum() + forces.pow(2).sum() + forces.pow(3).sum(), forces};
}

void check_layers(const DeviceMesh& mesh, Draw& draw, std::uint64_t n) {
  const int me = mesh.all().rank(), ranks = mesh.all().size();
  const Cut cut(draw, ranks);
  const auto nodes = static_cast<std::int64_t>(cut.id.size());
  const Graph graph(draw, nodes);
  Ids here, source, target;
  for (std::size_t e = 0; e < graph.source.size(); ++e) {
    const Ids& own = cut.owned[me];
    if (std::ranges::find(own, graph.target[e]) == own.end()) continue;
    here.push_back(static_cast<std::int64_t>(e));
    source.push_back(cut.id[graph.source[e]]);
    target.push_back(cut.id[graph.target[e]]);
  }
  const int layers = draw.between(1, 4), depth = draw.between(1, 4);
  seed(n);
  const at::Tensor x = randn({nodes, 2}, at::kDouble).requires_grad_(true);
  const auto edges = static_cast<std::int64_t>(graph.source.size());
  const at::Tensor e = randn({edges, 2}, at::kDouble).requires_grad_(true);
  Values w, w_here;
  for (int k = 0; k < layers; ++k) {
    w.push_back((0.4 * randn({6, 2}, at::kDouble)).requires_grad_(true));
    w_here.push_back(w.back().detach().clone().requires_grad_(true));
  }
  at::Tensor h = x;
  for (const at::Tensor& weight : w)
    h = layer_of(h, e, index_of(graph.source), index_of(graph.target), nodes, weight);
  const auto [loss, forces] = loss_of(h, x);
  loss.backward();

  const GhostLayers g = ghost_layers(mesh, cut.ids(cut.owned[me]), source, target, depth);
  const at::Tensor own = index_of(cut.owned[me]), own_edges = index_of(here);
  const at::Tensor x_here = x.detach().index_select(0, own).requires_grad_(true);
  const at::Tensor e_here = e.detach().index_select(0, own_edges).requires_grad_(true);
  const std::string what =
      concat("case ", n, ", ", layers, " layers by ", depth, "\n", g.nodes.summary());
  EXPECT_EQ(g.depth(), depth);
  int exchanges = 0;
  at::Tensor h_here = x_here;
  const at::Tensor all_edges = ghost_exchange(g.edges, e_here);
  for (int k = 0; k < layers; ++k) {
    if (k % depth == 0) {
      h_here = ghost_exchange(g.nodes, h_here);
      ++exchanges;
    }
    const int left = g.left_after(k, layers);
    const std::int64_t count = g.edges_to(left);
    h_here = layer_of(h_here, all_edges.narrow(0, 0, count), index_of(g.source).narrow(0, 0, count),
                      index_of(g.target).narrow(0, 0, count), g.rows_to(left), w_here[k]);
  }
  const auto [loss_here, forces_here] = loss_of(h_here, x_here);
  loss_here.backward();
  EXPECT_EQ(exchanges, (layers + depth - 1) / depth);
  EXPECT_LT(difference(h_here, h.index_select(0, own)), 1e-12) << what;
  EXPECT_LT(difference(forces_here, forces.index_select(0, own)), 1e-10) << what;
  const auto gradient = [&](const at::Tensor& t) {
    return t.grad().defined() ? t.grad() : at::zeros_like(t);
  };
  EXPECT_LT(difference(gradient(x_here), gradient(x).index_select(0, own), 1e-3), 1e-10) << what;
  EXPECT_LT(difference(gradient(e_here), gradient(e).index_select(0, own_edges), 1e-3), 1e-10)
      << what;
  for (int k = 0; k < layers; ++k) {
    at::Tensor sum = gradient(w_here[k]).clone();
    mesh.all().all_reduce(sum);
    EXPECT_LT(difference(sum, gradient(w[k]), 1e-3), 1e-10) << "weight " << k << ' ' << what;
  }
}

class LayersOfGhosts : public ::testing::TestWithParam<int> {};

TEST_P(LayersOfGhosts, CarryANetworkWhoseForcesAreTrained) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 8 : 40); ++n) {
      Draw draw(n * 89 + static_cast<std::uint64_t>(ranks));
      check_layers(manager.mesh(draw.mesh(ranks)), draw, n);
      if (::testing::Test::HasFailure()) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LayersOfGhosts, ::testing::Values(1, 2, 3, 4));

// A ring of 12 nodes with edges to both sides, in blocks of four: what each depth costs is known.
TEST(GhostLayers, AreInOrderOfLayerAndTheirCostsAreCounted) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const std::int64_t me = manager.rank();
    Ids owned, source, target;
    for (std::int64_t i = 4 * me; i < 4 * me + 4; ++i) {
      owned.push_back(i);
      for (const std::int64_t from : {(i + 11) % 12, (i + 1) % 12}) {
        source.push_back(from);
        target.push_back(i);
      }
    }
    const GhostLayers g = ghost_layers(mesh, owned, source, target, 2);
    const std::int64_t a = 4 * me + 11, b = 4 * me + 4;
    EXPECT_EQ(Ids(g.ghosts.begin(), g.ghosts.begin() + 2), (Ids{a % 12, b % 12}));
    EXPECT_EQ(std::set(g.ghosts.begin() + 2, g.ghosts.end()),
              (std::set<std::int64_t>{(a - 1) % 12, (b + 1) % 12}));
    EXPECT_EQ(g.rows_of, (Ids{4, 6, 8}));
    EXPECT_EQ(g.edges_of, (Ids{8, 12}));
    EXPECT_THROW(g.rows_to(3), InvalidArgument);
    EXPECT_THROW(g.edges_to(2), InvalidArgument);
    EXPECT_THROW(g.rows_to(-1), InvalidArgument);
    const LayerCosts costs = layer_costs(g, 3, {1e-3, 1e-6, 1e-6});
    EXPECT_EQ(
        costs.summary(),
        "a network of 3 layers on 3 ranks:\n"
        "  depth 1: 3 exchanges, 18 rows moved, 0 rows and 0 edges computed twice, 6006.0 us\n"
        "  depth 2: 2 exchanges, 24 rows moved, 6 rows and 12 edges computed twice, 4012.0 us\n"
        "  cheapest: an exchange for every 2 layers\n");
    EXPECT_EQ(layer_costs(g, 3, {0, 1e-6, 1e-3}).cheapest(), 1);

    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      const std::string text = thrown<InvalidArgument>(call);
      EXPECT_TRUE(has(text, part)) << text;
    };
    refused("rank 1: the target of an edge: id 0",
            [&] { ghost_layers(mesh, owned, Ids{5}, me == 1 ? Ids{0} : Ids{4 * me}, 1); });
    refused("no rank owns: 77 (needed by rank 2",
            [&] { ghost_layers(mesh, owned, Ids{me == 2 ? 77 : 0}, Ids{4 * me}, 3); });
    refused("1 sources of edges and 2 targets",
            [&] { ghost_layers(mesh, owned, Ids{1}, Ids{4 * me, 4 * me}, 1); });
    refused("give at least 1", [&] { ghost_layers(mesh, owned, Ids{}, Ids{}, 0); });
    refused("1 layers on rank 0, 2 on rank 2",
            [&] { ghost_layers(mesh, owned, Ids{}, Ids{}, me == 2 ? 2 : 1); });
    refused("0 layers", [&] { layer_costs(g, 0); });
    refused("price", [&] { layer_costs(g, 1, {-1, 0, 0}); });
  });
}

}  // namespace
}  // namespace tessera::test::ghost_layers_test
