// Sharded parameters that are used shard by shard (tensor parallelism), and what users do with
// sharded parameters of any kind.

#include <ATen/autocast_mode.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sharded_parameters.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::test::sharded_parameters_test {

namespace {

// Heads of a width of their own, so that any number of them can be cut anywhere.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int width, int heads_, int each_)
      : heads(heads_),
        each(each_),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        q(register_module("q", torch::nn::Linear(width, heads * each))),
        // its gradient would be zero
        k(register_module(
            "k", torch::nn::Linear(torch::nn::LinearOptions(width, heads * each).bias(false)))),
        v(register_module("v", torch::nn::Linear(width, heads * each))),
        out(register_module("out", torch::nn::Linear(heads * each, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor n = norm(x);
    const auto split = [&](const at::Tensor& t) {
      return t.view({x.size(0), x.size(1), heads, each}).transpose(1, 2);
    };
    const at::Tensor a = at::scaled_dot_product_attention(split(q(n)), split(k(n)), split(v(n)));
    return x + out(a.transpose(1, 2).reshape({x.size(0), x.size(1), heads * each}));
  }
  int heads, each;
  torch::nn::LayerNorm norm;
  torch::nn::Linear q, k, v, out;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  MlpImpl(int width, int hidden)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

struct BlocksImpl : torch::nn::Module {
  BlocksImpl()
      : attention(register_module("attention", Attention(6, 5, 2))),
        mlp(register_module("mlp", Mlp(6, 7))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))) {}
  at::Tensor forward(const at::Tensor& x) { return norm(mlp(attention(x))); }
  Attention attention;
  Mlp mlp;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Blocks);

// Five heads over the ranks, seven hidden units likewise: neither divides evenly.
NamedPlacements tensor_parallel(int axes, int axis, const Sizes& heads, const Sizes& hidden) {
  const auto at = [&](int dim, const Sizes& sizes) {
    std::vector<Placement> placements(axes);
    placements[axis] = Shard(dim);
    return ParameterPlacement{placements, {{dim, sizes}}};
  };
  Sizes features;
  for (const auto n : heads) features.push_back(2 * n);
  NamedPlacements all{{"*.out.weight", at(1, features)},
                      {"*.down.weight", at(1, hidden)},
                      {"*.up.*", at(0, hidden)}};
  for (const char* name : {"*.q.*", "*.k.*", "*.v.*"}) all.emplace_back(name, at(0, features));
  return all;
}

}  // namespace

TEST(TensorParallel, FiveHeadsOverThreeRanks) {
  const std::vector<std::pair<Sizes, Sizes>> cuts{
      {{2, 2, 1}, {3, 3, 1}}, {{5, 0, 0}, {0, 7, 0}}, {{0, 4, 1}, {1, 0, 6}}};
  for (const auto& [heads, hidden] : cuts) {
    on_ranks(3, [&, heads = heads, hidden = hidden](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh({{"tensor", 3}});
      auto net = prepared(Blocks()), expected = prepared(Blocks());
      distribute_module(*net, mesh, tensor_parallel(1, 0, heads, hidden));
      torch::optim::Adam opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = randn({2, 4, 6}, at::kDouble);
        expected_opt.zero_grad();
        opt.zero_grad();
        const at::Tensor loss = expected(x).square().mean();
        loss.backward();
        const at::Tensor input = distribute_tensor(x, mesh, {Replicate()});
        const CommTraceScope trace(manager);
        const at::Tensor got = net(input).square().mean();
        EXPECT_EQ(counts(*trace)["all_reduce"].calls, 2) << "one a block: attention, MLP\n"
                                                         << trace->table();
        EXPECT_EQ(counts(*trace)["all_reduce"].bytes, 2 * 2 * 4 * 6 * 8)
            << "of the activations' size";
        trace->clear();
        got.backward();
        EXPECT_EQ(counts(*trace)["all_reduce"].calls, 2) << trace->table();
        EXPECT_EQ(counts(*trace).size(), 1u) << trace->table();
        EXPECT_LT(difference(got, loss), 1e-11);
        expected_opt.step();
        opt.step();
      }
      expect_alike(*net, *expected, concat(list(heads), " heads"));
    });
  }
}

TEST(TensorParallel, BesideShardedData) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"data", 2}, {"tensor", 2}});
    auto net = prepared(Blocks()), expected = prepared(Blocks());
    distribute_module(*net, mesh, tensor_parallel(2, 1, {4, 1}, {2, 5}));
    torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = randn({3, 4, 6}, at::kDouble);
      expected_opt.zero_grad();
      opt.zero_grad();
      expected(x).square().mean().backward();
      const at::Tensor input = distribute_tensor(x, mesh, {Shard(0), Replicate()}, {{0, {3, 0}}});
      const CommTraceScope trace(manager);
      net(input).square().mean().backward();
      std::map<std::string, int> calls;
      for (const CommSummary& s : trace->summary()) calls[s.group] += static_cast<int>(s.count);
      EXPECT_EQ(calls[mesh.group("tensor").name()], 4) << trace->table();
      EXPECT_EQ(calls[mesh.group("data").name()], 1) << "one bucket of all gradients\n"
                                                     << trace->table();
      EXPECT_EQ(calls.size(), 2u) << trace->table();
      expected_opt.step();
      opt.step();
    }
    expect_alike(*net, *expected, "data and tensor");
  });
}

// Samples, the sequence (attention goes round a ring) and the layers over three axes of one mesh.
TEST(TensorParallel, BesideSamplesAndSequencesThatAreSharded) {
  on_ranks(8, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}, {"tensor", 2}});
    auto net = prepared(Blocks()), expected = prepared(Blocks());
    distribute_module(*net, mesh, tensor_parallel(3, 2, {4, 1}, {2, 5}));
    torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = randn({3, 4, 6}, at::kDouble);
      expected_opt.zero_grad();
      opt.zero_grad();
      const at::Tensor wanted = expected(x);
      wanted.square().mean().backward();
      const at::Tensor got = net(distribute_tensor(x, mesh, {Shard(0), Shard(1), Replicate()},
                                                   {{0, {2, 1}}, {1, {3, 1}}}));
      EXPECT_LT(difference(got, wanted), 1e-11);
      EXPECT_TRUE(spec(got).placements()[0] == Shard(0) && spec(got).placements()[1] == Shard(1));
      got.square().mean().backward();
      expected_opt.step();
      opt.step();
    }
    expect_alike(*net, *expected, "data, domain and tensor");
  });
}

// ---- what users do with parameters ----

TEST(ShardedParameters, EveryOptimizerAndClippingOverMixedPlacements) {
  for (int kind = 0; kind < 6; ++kind) {
    // LBFGS looks along its line and amplifies round-off: no clipping in its closure, and fewer
    // steps.
    const bool line = kind == 5;
    on_ranks(4, [&](DistributedManager& manager) {
      // LBFGS makes one vector of all gradients
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"data", 2}, {"tensor", 2}});
      auto net = prepared(Blocks()), expected = prepared(Blocks());
      NamedPlacements placements = tensor_parallel(2, 1, {4, 1}, {2, 5});
      placements.insert(placements.begin(),
                        {"mlp.norm.*", {{Shard(0), Replicate()}, {{0, {5, 1}}}}});
      distribute_module(*net, mesh, placements);
      const auto make =
          [&](const std::vector<at::Tensor>& p) -> std::unique_ptr<torch::optim::Optimizer> {
        switch (kind) {
          case 0:
            return std::make_unique<torch::optim::SGD>(
                p, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
          case 1:
            return std::make_unique<torch::optim::Adam>(
                p, torch::optim::AdamOptions(0.01).amsgrad(true));
          case 2:
            return std::make_unique<torch::optim::AdamW>(p, 0.01);
          case 3:
            return std::make_unique<torch::optim::RMSprop>(
                p, torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5));
          case 4:
            return std::make_unique<torch::optim::Adagrad>(p, 0.05);
          default:
            return std::make_unique<torch::optim::LBFGS>(
                p, torch::optim::LBFGSOptions(0.1).max_iter(4));
        }
      };
      auto opt = make(net->parameters()), expected_opt = make(expected->parameters());
      for (int step = 0; step < (line ? 1 : 3); ++step) {
        const at::Tensor x = randn({3, 4, 6}, at::kDouble),
                         sharded =
                             distribute_tensor(x, mesh, {Shard(0), Replicate()}, {{0, {1, 2}}});
        const auto closure = [&](torch::optim::Optimizer& o, Blocks& m, const at::Tensor& in,
                                 double& norm) {
          return [&] {
            o.zero_grad();
            const at::Tensor loss = m(in).sin().mean();
            loss.backward();
            norm = torch::nn::utils::clip_grad_norm_(m->parameters(), line ? 1e6 : 0.05);
            return loss;
          };
        };
        double norm = 0, expected_norm = 0;
        expected_opt->step(closure(*expected_opt, expected, x, expected_norm));
        opt->step(closure(*opt, net, sharded, norm));
        EXPECT_NEAR(norm, expected_norm, (line ? 1e-7 : 1e-10) * expected_norm);
      }
      const auto a = net->named_parameters(), b = expected->named_parameters();
      for (const auto& item : b)
        EXPECT_LT(difference(a[item.key()], item.value()), line ? 1e-7 : 1e-9)
            << "optimizer " << kind << " " << item.key();
    });
  }
}

TEST(ShardedParameters, AutocastGathersWhatWasCast) {
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(8, 6), expected(8, 6);
    fill(*net, 2);
    fill(*expected, 2);
    distribute_module(*net, mesh, {{"*", {{Shard(0)}, {{0, {5, 1}}}}}});
    const at::Tensor x = randn({4, 8});
    const auto forward = [](torch::nn::Linear& m, const at::Tensor& in) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor y = m(in);
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return y;
    };
    forward(expected, x).sum().backward();
    const at::Tensor input = distribute_tensor(x, mesh, {Shard(0)});
    const CommTraceScope trace(manager);
    const at::Tensor y = forward(net, input);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(counts(*trace)["all_gather"].bytes, (8 + 1) * (manager.rank() == 0 ? 5 : 1) * 2)
        << "two bytes a number\n"
        << trace->table();
    y.sum().backward();
    EXPECT_LT(difference(net->weight.grad(), expected->weight.grad()), 2e-2);
    EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(spec(net->weight.grad()) == spec(net->weight));
  });
}

TEST(ShardedParameters, BuffersAndPatterns) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net =
        prepared(torch::nn::Sequential(torch::nn::Conv2d(2, 4, 3), torch::nn::BatchNorm2d(4)));
    distribute_module(*net, mesh,
                      {{"1.running_*", {{Shard(0)}, {{0, {3, 1}}}}}, {"0.weight", {{Shard(-1)}}}});
    const auto buffers = net->named_buffers();
    EXPECT_EQ(placements(buffers["1.running_mean"])[0], Shard(0));
    EXPECT_EQ(to_local(buffers["1.running_var"]).size(0), manager.rank() == 0 ? 3 : 1);
    EXPECT_EQ(placements(buffers["1.num_batches_tracked"])[0], Replicate());
    EXPECT_EQ(placements(net->named_parameters()["0.weight"])[0], Shard(3));
    EXPECT_EQ(placements(net->named_parameters()["0.bias"])[0], Replicate());
    auto other = torch::nn::Linear(2, 2);
    EXPECT_THROW(distribute_module(*other, mesh, {{"wieght", {{Shard(0)}}}}), InvalidArgument);
    EXPECT_FALSE(is_sharded(other->weight));
    EXPECT_THROW(distribute_module(*other, mesh, {{"*", {{Partial()}}}}), InvalidArgument);
    EXPECT_THROW(distribute_module(*other, mesh, {{"*", {{Shard(1)}}}}), InvalidArgument)
        << "a bias has one dim";
    EXPECT_FALSE(is_sharded(other->weight));
  });
}

TEST(ShardedParameters, RanksThatDifferAllThrow) {
  on_ranks(2, [](DistributedManager& manager) {
    torch::nn::Linear net(3, manager.rank() == 0 ? 3 : 4);
    EXPECT_THROW(distribute_module(*net, manager.mesh({{"x", 2}})), MismatchError);
  });
}

// What one rank alone cannot distribute is an error on all of them, and changes nothing.
TEST(ShardedParameters, WhatOneRankRefusesAllRefuse) {
  using Prepare = std::function<std::shared_ptr<void>(torch::nn::Sequential&, DistributedManager&)>;
  const auto first = [](torch::nn::Sequential& net) { return net->ptr<torch::nn::LinearImpl>(0); };
  const std::vector<Prepare> all{
      [&](torch::nn::Sequential& net, DistributedManager&) {
        first(net)->weight.mutable_grad() = at::zeros({3, 3});
        return nullptr;
      },
      [&](torch::nn::Sequential& net, DistributedManager&) {
        return std::make_shared<GradientReducer>(
            std::vector<ReducedParameter>{{first(net)->weight, "w", Group()}});
      },
      [&](torch::nn::Sequential& net, DistributedManager&) {
        first(net)->weight.set_data(net->ptr<torch::nn::LinearImpl>(1)->weight.detach());
        return nullptr;
      },
      [&](torch::nn::Sequential& net, DistributedManager& manager) {
        distribute_module(*net->ptr(0), manager.mesh(Mesh({{"x", 1}}, {manager.rank()})));
        return nullptr;
      }};
  on_ranks(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (const bool fully : {false, true}) {
        torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
        const auto kept = manager.rank() == 1 ? all[i](net, manager) : nullptr;
        if (fully) {
          EXPECT_THROW(fully_shard(*net, mesh), MismatchError) << i;
        } else {
          EXPECT_THROW(distribute_module(*net, mesh), MismatchError) << i;
        }
        EXPECT_FALSE(is_sharded(net->ptr<torch::nn::LinearImpl>(1)->weight)) << i;
      }
    }
    torch::nn::Sequential net(torch::nn::Linear(3, 3));
    EXPECT_THROW(
        distribute_module(*net, mesh, {{manager.rank() == 0 ? "0.*" : "1.*", {{Shard(0)}}}}),
        MismatchError);
    EXPECT_FALSE(is_sharded(net->ptr<torch::nn::LinearImpl>(0)->weight));
  });
}

// Ranks that were seeded differently would train two models.
TEST(ShardedParameters, StartFromTheFirstRanksValues) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    torch::nn::Linear net(4, 5);
    net->register_buffer("steps", at::full({2}, manager.rank(), at::kLong));
    net->to(at::kDouble);
    fill(*net, 100 + manager.rank());
    torch::nn::Linear first(4, 5);
    first->to(at::kDouble);
    fill(*first, 100);
    distribute_module(*net, mesh, {{"weight", {{Shard(0)}, {{0, {3, 0, 2}}}}}});
    EXPECT_TRUE(whole(net->weight).equal(first->weight));
    EXPECT_TRUE(to_local(net->bias).equal(first->bias));
    EXPECT_EQ(to_local(net->named_buffers()["steps"]).sum().item<std::int64_t>(), 0);
  });
}

}  // namespace tessera::test::sharded_parameters_test
