// Deferred construction: values do not depend on ranks and placements, and what has none is told.

#include <gtest/gtest.h>

#include "byte_counter.h"
#include "support.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::deferred_test {

namespace {

namespace nn = torch::nn;

// Initialisation of every kind that libtorch's layers have, and some of users' own: computed from
// other tensors, through views, in another dtype.
struct ManyImpl : nn::Module {
  ManyImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 5, 3)));
    table = register_module("table", nn::Embedding(nn::EmbeddingOptions(7, 4).padding_idx(2)));
    up = register_module("up", nn::Linear(4, 9));
    norm = register_module("norm", nn::BatchNorm1d(9));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(9, 3).num_layers(2)));
    attention = register_module("attention", nn::MultiheadAttention(4, 2));
    square = register_parameter("square", torch::empty({6, 6}));
    nn::init::orthogonal_(square);
    scaled = register_parameter("scaled", torch::randn({8, 3}) / 8);
    skewed = register_parameter("skewed", torch::linspace(0, 1, 12).view({4, 3}).t());
    halved = register_buffer("halved", torch::ones({5}, torch::kFloat64).mul(0.5));
    given = register_buffer("given", torch::tensor({1.0, 2.0, 3.0}));
    const torch::NoGradGuard no_grad;
    scaled.slice(0, 2, 5).zero_();
    scaled[7].uniform_(2, 3);
  }
  nn::Conv2d conv = nullptr;
  nn::Embedding table = nullptr;
  nn::Linear up = nullptr;
  nn::BatchNorm1d norm = nullptr;
  nn::LSTM lstm = nullptr;
  nn::MultiheadAttention attention = nullptr;
  at::Tensor square, scaled, skewed, halved, given;
};
TORCH_MODULE(Many);

std::map<std::string, at::Tensor> values_of(const nn::Module& net) {
  std::map<std::string, at::Tensor> all;
  for (const auto& p : net.named_parameters()) all[p.key()] = whole(p.value()).clone();
  for (const auto& b : net.named_buffers()) all[b.key()] = whole(b.value()).clone();
  return all;
}

void expect_equal(const std::map<std::string, at::Tensor>& got,
                  const std::map<std::string, at::Tensor>& expected, const std::string& where) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(got.at(name).equal(value)) << where << name;
}

// What the ranks make, placed by `place`.
template <class Place>
std::map<std::string, at::Tensor> made_by(DistributedManager& manager, const Place& place) {
  manual_seed(manager, 5);
  set_policies(manager, {.redistribution = Policy::error});
  auto net = deferred([] { return Many(); });
  for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(is_deferred(p));
  EXPECT_FALSE(is_deferred(net->given)) << "read from memory";
  place(*net, manager);
  for (const at::Tensor& p : net->parameters())
    EXPECT_TRUE(is_sharded(p) && !is_deferred(p) && p.requires_grad() && p.is_leaf());
  const auto all = values_of(*net);
  EXPECT_EQ(policies(manager).redistribution, Policy::error) << "as before";
  // The numbers after it are those of a model that was made whole.
  EXPECT_EQ(random_state(manager).seed, 5u);
  return all;
}

void place_rows(nn::Module& net, DistributedManager& manager) {
  Draw draw(3);
  const auto mesh = manager.mesh(draw.mesh(manager.world_size()));
  distribute_module(net, mesh, [&](const std::string&, const at::Tensor& t) {
    return std::optional(ParameterPlacement{draw.spec(mesh, t.sizes().vec(), false).placements()});
  });
}

// Ranks in descending order.
Mesh reversed(int ranks) {
  std::vector<int> table;
  for (int r = ranks - 1; r >= 0; --r) table.push_back(r);
  return {{{"x", ranks}}, table};
}

void place_fully(nn::Module& net, DistributedManager& manager) {
  fully_shard(net, manager.mesh(reversed(manager.world_size())), {.coalesce_bytes = 0});
}

}  // namespace

TEST(Deferred, ValuesDependOnNeitherRanksNorPlacements) {
  std::map<std::string, at::Tensor> expected;
  run_threads(1, [&](DistributedManager& manager) {
    expected = made_by(manager, [](nn::Module& net, DistributedManager& one) {
      distribute_module(net, one.mesh({{"x", 1}}));
    });
  });
  EXPECT_TRUE(expected.at("table.weight")[2].eq(0).all().item<bool>());
  EXPECT_TRUE(expected.at("scaled").slice(0, 2, 5).eq(0).all().item<bool>());
  EXPECT_LT(difference(expected.at("square").matmul(expected.at("square").t()), at::eye(6)), 1e-5);
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      expect_equal(made_by(manager, &place_rows), expected, concat(ranks, " ranks, drawn: "));
      expect_equal(made_by(manager, &place_fully), expected, concat(ranks, " ranks, fully: "));
    });
  }
}

// The same draws in the same order as a constructor that computes at once.
TEST(Deferred, MaterializedIsAsConstructed) {
  torch::manual_seed(11);
  const Many expected;
  torch::manual_seed(11);
  auto net = deferred([] { return Many(); });
  materialize(*net);
  expect_equal(values_of(*net), values_of(*expected), "");
  for (const at::Tensor& p : net->parameters())
    EXPECT_TRUE(!p.is_meta() && p.requires_grad() && p.is_leaf());
  EXPECT_TRUE(net->up(torch::ones({2, 4})).defined());
}

TEST(Deferred, WhatIsDoneAfterTheScopeIsRecordedToo) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net = deferred([] { return nn::Linear(3, 4); });
    net->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      net->bias.fill_(7);
    }
    distribute_module(*net, mesh, {{"*", {{Shard(0)}}}});
    EXPECT_EQ(net->weight.scalar_type(), at::kDouble);
    EXPECT_TRUE(whole(net->bias).eq(7).all().item<bool>());
  });
}

TEST(Deferred, TrainsAsTheSameModelMadeWhole) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const auto make = [] {
      nn::Sequential net(nn::Linear(5, 8), nn::Tanh(), nn::Linear(8, 2));
      net->to(at::kDouble);
      return net;
    };
    manual_seed(manager, 9);
    auto net = deferred(make), one = deferred(make);
    fully_shard(*net, mesh);
    manual_seed(manager, 9);
    distribute_module(*one, mesh);
    torch::optim::Adam a(net->parameters(), 0.1), b(one->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x =
          distribute_tensor(randn({7, 5}, at::kDouble), mesh, {Shard(0)}, {{0, {4, 0, 3}}});
      a.zero_grad();
      b.zero_grad();
      net->forward(x).square().mean().backward();
      one->forward(x).square().mean().backward();
      a.step();
      b.step();
    }
    const auto got = values_of(*net);
    for (const auto& [name, value] : values_of(*one))
      EXPECT_LT(difference(got.at(name), value), 1e-12) << name;
  });
}

TEST(Deferred, ARankHoldsItsShardsAndOneParameter) {
  const ByteCounter counter;
  on_ranks(4, [&](DistributedManager& manager) {
    const int rank = manager.rank();
    const auto mesh = manager.mesh({{"x", 4}});
    static constexpr std::int64_t kLayers = 8, kWidth = 128, kOne = kWidth * kWidth * 4;
    constexpr std::int64_t kShard = kLayers * (kOne + kWidth * 4) / 4;
    ByteCounter::count_as(rank);
    auto net = deferred([] {
      nn::Sequential all;
      for (int i = 0; i < kLayers; ++i) all->push_back(nn::Linear(kWidth, kWidth));
      return all;
    });
    EXPECT_LT(counter.most(rank), kOne / 8) << "nothing has memory yet";
    fully_shard(*net, mesh, {.units = {"*"}});
    EXPECT_LE(counter.most(rank), kShard + kOne) << "of " << 4 * kShard << " in all";
    EXPECT_GE(counter.most(rank), kShard);
    ByteCounter::count_as(-1);
  });
}

TEST(Deferred, MistakesAreTold) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    // Values that are not there.
    EXPECT_THROW(deferred([] { return torch::ones({2}).sum().item<float>(); }), NotAvailable);
    auto net = deferred([] { return nn::Linear(3, 4); });
    EXPECT_THROW(net(torch::ones({2, 3})).sum().item<float>(), NotAvailable);
    EXPECT_THROW(deferred([] { return torch::randperm(4); }), NotAvailable);
    EXPECT_THROW(
        deferred([] { return torch::empty({3}).uniform_(0, 1, at::detail::createCPUGenerator()); }),
        NotAvailable);
    {
      const DeferredScope scope;
      EXPECT_THROW(distribute_module(*net, mesh), InvalidArgument);
    }
    // On the meta device by the program's own hand.
    struct OnMeta : nn::Module {
      OnMeta() { register_parameter("weight", torch::empty({3, 4}, torch::kMeta)); }
    } meta;
    EXPECT_THROW(distribute_module(meta, mesh), ShardingError);
    // Ranks that did different things.
    auto other = deferred([&] {
      nn::Linear made(3, 4);
      const torch::NoGradGuard no_grad;
      made->bias.fill_(manager.rank());
      return made;
    });
    EXPECT_THROW(distribute_module(*other, mesh), MismatchError);
    // Of two scopes.
    const at::Tensor a = deferred([] { return torch::ones({2}); }),
                     b = deferred([] { return torch::ones({2}); });
    EXPECT_THROW(a + b, NotAvailable);
    // What failed is still to be placed.
    distribute_module(*net, mesh);
    EXPECT_TRUE(is_sharded(net->weight));
  });
}

}  // namespace tessera::test::deferred_test
