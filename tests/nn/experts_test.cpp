// Experts: tokens travel to them and back, and values and gradients are those of one process.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::test::experts_test {

namespace {

namespace nn = torch::nn;

struct Weights {
  at::Tensor router, up, down;
};

// What experts are, token by token.
struct Reference {
  at::Tensor value, balance;
  std::int64_t left_out = 0;
  std::vector<std::int64_t> chosen;
};

Reference reference(const at::Tensor& x, const Weights& w, const ExpertsOptions& o) {
  const std::int64_t tokens = x.size(0), experts = w.router.size(0);
  const at::Tensor p = x.matmul(w.router.t()).softmax(-1);
  const at::Tensor order = std::get<1>(at::sort(p.detach(), true, 1, true));
  const double mean = static_cast<double>(tokens * o.chosen) / static_cast<double>(experts);
  const auto room =
      o.capacity > 0 ? static_cast<std::int64_t>(std::ceil(o.capacity * mean)) : tokens * o.chosen;
  std::vector<at::Tensor> rows(static_cast<std::size_t>(tokens),
                               at::zeros({x.size(1)}, x.options()));
  Reference r;
  std::vector<std::int64_t> taken(static_cast<std::size_t>(experts), 0);
  r.chosen = taken;
  for (std::int64_t j = 0; j < o.chosen; ++j)
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto e = order[t][j].item<std::int64_t>();
      ++r.chosen[static_cast<std::size_t>(e)];
      if (taken[static_cast<std::size_t>(e)] == room) {
        ++r.left_out;
        continue;
      }
      ++taken[static_cast<std::size_t>(e)];
      at::Tensor weight = p[t][e];
      if (o.normalized)
        weight = weight / p[t].index_select(0, order[t].narrow(0, 0, o.chosen)).sum();
      rows[static_cast<std::size_t>(t)] = rows[static_cast<std::size_t>(t)] +
                                          weight * at::gelu(x[t].matmul(w.up[e])).matmul(w.down[e]);
    }
  r.value = tokens > 0 ? at::stack(rows) : x * 0;
  r.balance = at::zeros({}, x.options());
  for (std::int64_t e = 0; e < experts; ++e)
    r.balance = r.balance + p.select(1, e).sum() *
                                (static_cast<double>(r.chosen[static_cast<std::size_t>(e)]) *
                                 static_cast<double>(experts) /
                                 static_cast<double>(std::max<std::int64_t>(tokens, 1)) /
                                 static_cast<double>(std::max<std::int64_t>(tokens * o.chosen, 1)));
  return r;
}

ExpertsOptions drawn_options(Draw& draw) {
  ExpertsOptions o{
      .experts = draw.between(1, 7), .features = draw.between(1, 4), .hidden = draw.between(1, 5)};
  o.chosen = draw.between(1, static_cast<int>(std::min<std::int64_t>(o.experts, 3)));
  o.capacity = draw.of(std::vector<double>{0, 0, 0.4, 1, 1.3});
  o.normalized = draw.chance(50);
  return o;
}

Experts experts_of(const ExpertsOptions& o, std::uint64_t with) {
  Experts net(o);
  net->to(at::kDouble);
  fill(*net, with);
  return net;
}

Weights copies(const Experts& net) {
  const auto copy = [](const at::Tensor& t) { return t.detach().clone().requires_grad_(true); };
  return {copy(net->router), copy(net->up), copy(net->down)};
}

at::Tensor loss_of(const at::Tensor& value, const at::Tensor& balance) {
  return (value.square() + value).sum() + balance * 0.7;
}

// One to three axes, one of them the experts'.
std::vector<Axis> axes_of(Draw& draw, int ranks) {
  std::vector<Axis> axes{{"expert", ranks}};
  if (ranks == 4 && draw.chance(60)) axes = {{"data", 2}, {"expert", 2}};
  if (draw.chance(40)) axes.push_back({"other", 1});
  if (draw.chance(50)) std::ranges::reverse(axes);
  return axes;
}

// Weights on the experts' axis, with sizes of their own, or anywhere.
ModuleRule drawn_rule(Draw& draw, const DeviceMesh& mesh, std::int64_t experts) {
  const int ranks = mesh.group("expert").size();
  const auto on_axis = experts_on(mesh, "expert", draw.sizes(experts, ranks));
  const bool anywhere = draw.chance(25);
  return [&draw, mesh, on_axis, anywhere](const std::string& name, const at::Tensor& t) {
    if (name == "router") return std::optional<ParameterPlacement>();
    if (!anywhere) return std::optional(on_axis);
    return std::optional(ParameterPlacement{draw.spec(mesh, t.sizes().vec(), false).placements()});
  };
}

ShardSpec rows_spec(Draw& draw, const DeviceMesh& mesh, std::vector<std::int64_t> shape) {
  std::vector<Placement> where;
  int parts = 1;
  for (const Axis& axis : mesh.mesh().axes()) {
    const bool shard = draw.chance(75);
    where.push_back(shard ? Placement(Shard(0)) : Placement(Replicate()));
    if (shard) parts *= axis.size;
  }
  ShardSizes sizes;
  if (std::ranges::any_of(where, [](const Placement& p) { return p.is_shard(); }))
    sizes[0] = draw.sizes(shape[0], parts);
  return {mesh, shape, where, sizes};
}

}  // namespace

TEST(Experts, EqualOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(static_cast<std::uint64_t>(40 + ranks));
      for (int round = 0; round < 25; ++round) {
        const std::string where = concat(ranks, " ranks, round ", round);
        const auto mesh = manager.mesh(draw.mapped(axes_of(draw, ranks)));
        const ExpertsOptions o = drawn_options(draw);
        Experts net = experts_of(o, static_cast<std::uint64_t>(round));
        const std::int64_t tokens = draw.between(0, 13);
        at::Tensor x = randn({tokens, o.features}, at::kDouble);
        // Ties: all experts alike.
        if (draw.chance(20)) {
          const at::NoGradGuard no_grad;
          net->router.zero_();
        }
        const Weights w = copies(net);
        const at::Tensor one = x.clone().requires_grad_(true);
        const Reference expected = reference(one, w, o);
        loss_of(expected.value, expected.balance).backward();
        // On one process as it is, and placed.
        Experts plain = experts_of(o, 0);
        {
          const at::NoGradGuard no_grad;
          plain->router.copy_(w.router), plain->up.copy_(w.up), plain->down.copy_(w.down);
        }
        const at::Tensor alone = x.clone().requires_grad_(true);
        const ExpertsOutput by_one = plain->forward(alone);
        loss_of(by_one.value, by_one.balance).backward();
        distribute_module(*net, mesh, drawn_rule(draw, mesh, o.experts));
        const at::Tensor sharded = leaf(x, rows_spec(draw, mesh, x.sizes().vec()));
        const ExpertsOutput got = net->forward(sharded);
        loss_of(got.value, got.balance).backward();
        EXPECT_EQ(spec(got.value).placements(), spec(sharded).placements()) << where;
        const auto same = [&](const at::Tensor& a, const at::Tensor& b, const char* what) {
          ASSERT_TRUE(a.defined()) << where << ": " << what;
          EXPECT_LT(difference(a, b.defined() ? b : at::zeros_like(a), 1e-3), 1e-11)
              << where << ": " << what;
        };
        for (const auto& [v, b, xg, rg, ug, dg] :
             {std::tuple(got.value, got.balance, sharded.grad(), net->router.grad(), net->up.grad(),
                         net->down.grad()),
              std::tuple(by_one.value, by_one.balance, alone.grad(), plain->router.grad(),
                         plain->up.grad(), plain->down.grad())}) {
          same(v, expected.value, "value");
          same(b, expected.balance, "balance");
          same(xg, one.grad(), "tokens' gradient");
          same(rg, w.router.grad(), "router's gradient");
          same(ug, w.up.grad().defined() ? w.up.grad() : at::zeros_like(w.up), "up's gradient");
          same(dg, w.down.grad().defined() ? w.down.grad() : at::zeros_like(w.down),
               "down's gradient");
        }
      }
    });
  }
}

TEST(Experts, RoutingTellsWhatWasChosenAndLeftOut) {
  on_ranks(3, [](DistributedManager& manager) {
    Draw draw(5);
    const auto mesh = manager.mesh({{"expert", 3}});
    for (int round = 0; round < 10; ++round) {
      ExpertsOptions o = drawn_options(draw);
      o.capacity = 0.7;
      const at::Tensor x = randn({draw.between(1, 20), o.features}, at::kDouble);
      const Experts net = experts_of(o, 3);
      const Reference expected = reference(x, copies(net), o);
      const at::Tensor p = x.matmul(net->router.t()).softmax(-1);
      const Routing routing(leaf(p, rows_spec(draw, mesh, p.sizes().vec())),
                            {.chosen = o.chosen, .capacity = o.capacity});
      EXPECT_EQ(routing.chosen(), expected.chosen);
      EXPECT_EQ(routing.left_out(), expected.left_out);
      std::int64_t mine = 0;
      for (const std::int64_t n : routing.counts()) mine += n;
      const auto all = mesh.all().all_gather_bytes(std::to_string(mine));
      std::int64_t taken = 0;
      for (const std::string& n : all) taken += std::stoll(n);
      EXPECT_EQ(taken, x.size(0) * o.chosen - expected.left_out);
    }
  });
}

// A layer, experts beside it, a layer.
struct NetImpl : nn::Module {
  NetImpl() {
    in = register_module("in", nn::Linear(5, 6));
    experts = register_module(
        "experts", Experts(ExpertsOptions{.experts = 5, .features = 6, .hidden = 7, .chosen = 2}));
    out = register_module("out", nn::Linear(6, 3));
    to(at::kDouble);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = in->forward(x).tanh();
    const auto [y, balance] = experts->forward(h);
    return {out->forward(h + y), balance};
  }
  nn::Linear in = nullptr, out = nullptr;
  Experts experts = nullptr;
};
TORCH_MODULE(Net);

// Data x experts x fully sharded: experts' weights sharded over data too, and dense layers over
// data alone, or over both.
TEST(Experts, TrainUnderFullyShardAsOneProcess) {
  for (const bool dense_over_all : {false, true}) {
    on_ranks(4, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", 2}, {"expert", 2}}));
      Net net, one;
      fill(*net, 8);
      fill(*one, 8);
      const ParameterPlacement on = experts_on(mesh);
      if (dense_over_all) {
        distribute_in_place({{"up", net->experts->up}, {"down", net->experts->down}}, mesh,
                            [&](const std::string&, const at::Tensor&) { return on; });
        fully_shard(*net, mesh, {.ignore = {"experts.up", "experts.down"}});
      } else {
        distribute_module(*net, mesh, {{"experts.up", on}, {"experts.down", on}});
        fully_shard(*net, mesh, {.units = {"in", "experts", "out"}, .axes = {"data"}});
        // Of up to three experts, between two ranks.
        EXPECT_LT(spec(net->experts->up).local_numel() + spec(net->experts->down).local_numel(),
                  3 * 2 * 6 * 7);
      }
      torch::optim::Adam a(net->parameters(), 0.05), b(one->parameters(), 0.05);
      Draw draw(2);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = randn({draw.between(3, 11), 5}, at::kDouble);
        a.zero_grad();
        b.zero_grad();
        const auto [y, balance] = net->forward(
            distribute_tensor(x, mesh, {Shard(0), Shard(0)}, {{0, draw.sizes(x.size(0), 4)}}));
        const auto [z, its] = one->forward(x);
        const at::Tensor loss = y.square().mean() + 0.1 * balance;
        const at::Tensor expected = z.square().mean() + 0.1 * its;
        EXPECT_LT(difference(loss, expected), 1e-11) << step;
        loss.backward();
        expected.backward();
        a.step();
        b.step();
      }
      for (const auto& p : one->named_parameters())
        EXPECT_LT(difference(net->named_parameters()[p.key()], p.value()), 1e-9) << p.key();
    });
  }
}

TEST(Experts, MoveTokensAndNoWeights) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 2}});
    constexpr std::int64_t kTokens = 12, kFeatures = 4, kHidden = 500;
    Experts net = experts_of({.experts = 4, .features = kFeatures, .hidden = kHidden}, 4);
    distribute_module(*net, mesh, {{"up", experts_on(mesh)}, {"down", experts_on(mesh)}});
    const at::Tensor x = leaf(randn({kTokens, kFeatures}, at::kDouble),
                              ShardSpec(mesh, {kTokens, kFeatures}, {Shard(0)}));
    const CommTraceScope trace(manager);
    const auto [y, balance] = net->forward(x);
    loss_of(y, balance).backward();
    int there_and_back = 0;
    std::int64_t bytes = 0;
    for (const CommEvent& e : trace->events()) {
      bytes += e.bytes;
      if (e.operation != "all_to_all") continue;
      ++there_and_back;
      EXPECT_LE(e.bytes, 2 * kTokens * kFeatures * 8) << trace->table();
    }
    EXPECT_EQ(there_and_back, 4) << "there and back, forward and backward";
    EXPECT_LT(bytes, kFeatures * kHidden * 8 / 2) << "no expert's weights travel";
  });
}

TEST(Experts, SecondDerivatives) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 2}});
    const ExpertsOptions o{.experts = 3, .features = 3, .hidden = 4, .chosen = 2};
    Experts net = experts_of(o, 6);
    const Weights w = copies(net);
    distribute_module(*net, mesh, {{"up", experts_on(mesh)}, {"down", experts_on(mesh)}});
    const at::Tensor x = randn({7, 3}, at::kDouble);
    const auto penalty = [](const at::Tensor& value, const at::Tensor& in) {
      const at::Tensor g = torch::autograd::grad({value.square().sum()}, {in}, {}, true, true)[0];
      return g.square().sum();
    };
    const at::Tensor sharded = leaf(x, ShardSpec(mesh, {7, 3}, {Shard(0)}, {{0, {5, 2}}}));
    const at::Tensor one = x.clone().requires_grad_(true);
    penalty(net->forward(sharded).value, sharded).backward();
    penalty(reference(one, w, o).value, one).backward();
    EXPECT_LT(difference(sharded.grad(), one.grad()), 1e-10);
    EXPECT_LT(difference(net->up.grad(), w.up.grad()), 1e-10);
    EXPECT_LT(difference(net->down.grad(), w.down.grad()), 1e-10);
    EXPECT_LT(difference(net->router.grad(), w.router.grad()), 1e-10);
  });
}

TEST(Experts, AreMadeOnNoRankAndTakeOtherShapesAndDtypes) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 2}});
    manual_seed(manager, 3);
    Experts net = deferred([] {
      return Experts(ExpertsOptions{.experts = 4, .features = 3, .hidden = 5, .chosen = 2});
    });
    EXPECT_TRUE(is_deferred(net->up));
    distribute_module(*net, mesh, {{"up", experts_on(mesh)}, {"down", experts_on(mesh)}});
    EXPECT_EQ(spec(net->up).local_shape()[0], 2);
    const at::Tensor x = randn({4, 2, 3});
    const at::Tensor rows =
        net->forward(distribute_tensor(x.reshape({8, 3}), mesh, {Shard(0)})).value;
    const at::Tensor y = net->forward(distribute_tensor(x, mesh, {Shard(0)})).value;
    EXPECT_EQ(y.sizes(), x.sizes());
    EXPECT_LT(difference(whole(y).reshape({8, 3}), rows), 1e-6);
    const at::Tensor low =
        net->forward(distribute_tensor(x.to(at::kDouble), mesh, {Shard(0)}).to(at::kFloat)).value;
    EXPECT_LT(difference(low, y), 1e-6);
    net->to(at::kBFloat16);
    const at::Tensor half =
        net->forward(distribute_tensor(x, mesh, {Shard(0)}).to(at::kBFloat16)).value;
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    EXPECT_LT(difference(half.to(at::kFloat), y), 0.2);
  });
}

TEST(Experts, AFailureOfOneRankIsToldToTheOthers) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 3}});
    ExpertsOptions o{.experts = 3, .features = 2, .hidden = 2};
    bool fails = manager.rank() == 1;
    o.activation = [&](const at::Tensor& h) {
      if (fails) throw std::runtime_error("no memory");
      return h.relu();
    };
    Experts net(o);
    distribute_module(*net, mesh, {{"up", experts_on(mesh)}, {"down", experts_on(mesh)}});
    const at::Tensor x = distribute_tensor(randn({6, 2}), mesh, {Shard(0)});
    if (fails)
      EXPECT_THROW(net->forward(x), std::runtime_error);
    else
      EXPECT_THROW(net->forward(x), PeerFailedError);
    // And goes on.
    fails = false;
    EXPECT_EQ(net->forward(x).value.size(0), 6);

    // What one rank alone made of its rows.
    const at::Tensor p = distribute_tensor(at::ones({6, 3}) / 3, mesh, {Shard(0)});
    const auto wrong = [&](const std::function<void(bool)>& call) {
      if (manager.rank() == 2)
        EXPECT_THROW(call(true), InvalidArgument);
      else
        EXPECT_THROW(call(false), PeerFailedError);
      EXPECT_EQ(Routing(p, {}).left_out(), 0);  // and goes on
    };
    wrong([&](bool here) {
      const Routing routing(p, {});
      const at::Tensor rows = routing.to_experts(x);
      routing.to_tokens(here ? at::cat({rows, rows.new_ones({1, 2})}) : rows);
    });
    wrong([&](bool here) {
      const Routing routing(p, {});
      const at::Tensor rows = routing.to_experts(x);
      const at::Tensor h =
          grouped_product(here ? at::cat({rows, rows.new_ones({1, 2})}) : rows, net->up, routing);
      routing.to_tokens(h);
    });
  });
}

TEST(Experts, MistakesAreTold) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 2}}), other = manager.mesh({{"data", 2}});
    const at::Tensor p = at::ones({4, 3}, at::kDouble) / 3;
    const at::Tensor sharded = distribute_tensor(p, mesh, {Shard(0)});
    EXPECT_THROW(Routing(p, {.chosen = 4}), InvalidArgument);
    EXPECT_THROW(Routing(p, {.chosen = 0}), InvalidArgument);
    EXPECT_THROW(Routing(p, {.capacity = -1}), InvalidArgument);
    EXPECT_THROW(Routing(p[0], {}), InvalidArgument);
    EXPECT_THROW(Routing(distribute_tensor(p, other, {Shard(0)}), {}), InvalidArgument);
    EXPECT_THROW(Routing(sharded, {.sizes = {1, 1}}), InvalidArgument);
    EXPECT_THROW(experts_on(other), InvalidArgument);
    EXPECT_THROW(Experts(ExpertsOptions{.experts = 2}), InvalidArgument);
    const Routing routing(sharded, {});
    EXPECT_THROW(routing.to_experts(p), InvalidArgument);
    EXPECT_THROW(routing.to_experts(sharded.narrow(0, 0, 2)), InvalidArgument);
    const at::Tensor rows = routing.to_experts(distribute_tensor(p, mesh, {Shard(0)}));
    EXPECT_THROW(routing.to_tokens(at::ones({rows.size(0) + 1, 3})), InvalidArgument);
    const at::Tensor plain = at::ones({3, 3, 2}, at::kDouble);
    EXPECT_THROW(grouped_product(rows, plain, routing), InvalidArgument);
    EXPECT_THROW(grouped_product(rows, distribute_tensor(plain, other, {Shard(0)}), routing),
                 InvalidArgument);
    EXPECT_THROW(
        grouped_product(rows, distribute_tensor(plain.to(at::kFloat), mesh, {Shard(0)}), routing),
        InvalidArgument);
    EXPECT_THROW(grouped_product(rows, distribute_tensor(plain[0], mesh, {Shard(0)}), routing),
                 InvalidArgument);
    Experts net(ExpertsOptions{.experts = 3, .features = 3, .hidden = 2});
    EXPECT_THROW(net->forward(at::ones({4, 2})), InvalidArgument);
    // No mistakes: any room for no tokens.
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    EXPECT_EQ(Routing(p.narrow(0, 0, 0), {.capacity = kInfinity}).left_out(), 0);
    EXPECT_EQ(Routing(p, {.capacity = kInfinity}).left_out(), 0);
  });
}

// Other weights than another rank has. The last case: a group may have ended afterwards.
TEST(Experts, OtherWeightsThanAnotherRankHasAreTold) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"expert", 2}});
    const at::Tensor p = distribute_tensor(at::ones({4, 3}) / 3, mesh, {Shard(0)});
    EXPECT_THROW(Routing(p, {.chosen = 2, .normalized = manager.rank() == 0}), MismatchError);
  });
}

}  // namespace tessera::test::experts_test
