// Modules that are on the meta device before they are deferred, and stages that one rank has alone:
// values are those of one process, and what has none is named.

#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include "../support/meta.h"
#include "support.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/sharded_optimizer.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::deferred_meta_test {

namespace {

namespace nn = torch::nn;

// Every layer that reset_parameters() knows, a table that a head shares, and values of its own.
struct LayersImpl : nn::Module {
  LayersImpl() {
    table = register_module("table", nn::Embedding(nn::EmbeddingOptions(7, 6).padding_idx(1)));
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(6, 4, 3)));
    back = register_module("back", nn::ConvTranspose1d(nn::ConvTranspose1dOptions(4, 6, 3)));
    batch = register_module("batch", nn::BatchNorm1d(4));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 3).num_layers(2)));
    attention = register_module("attention", nn::MultiheadAttention(6, 2));
    slopes = register_module("slopes", nn::PReLU(nn::PReLUOptions().num_parameters(4).init(0.5)));
    pair = register_module("pair", nn::Bilinear(3, 4, 5));
    head = register_module("head", nn::Sequential(nn::Linear(6, 7)));
  }
  nn::Embedding table = nullptr;
  nn::Conv1d conv = nullptr;
  nn::ConvTranspose1d back = nullptr;
  nn::BatchNorm1d batch = nullptr;
  nn::LayerNorm norm = nullptr;
  nn::LSTM lstm = nullptr;
  nn::MultiheadAttention attention = nullptr;
  nn::PReLU slopes = nullptr;
  nn::Bilinear pair = nullptr;
  nn::Sequential head = nullptr;
};
TORCH_MODULE(Layers);

// A weight that two modules have under their own names, which each of them initialises.
struct SharerImpl : nn::Module {
  explicit SharerImpl(at::Tensor shared, double scale = 1)
      : weight(register_parameter("weight", std::move(shared))),
        bias(register_parameter("bias", torch::empty({3}, torch::kMeta))),
        scale(scale) {}
  void fill() {
    const torch::NoGradGuard no_grad;
    weight.normal_(0, scale);
    bias.uniform_(-scale, scale);
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight) + bias; }
  at::Tensor weight, bias;
  double scale;
};
TORCH_MODULE(Sharer);

void fill_sharers(nn::Module& module) {
  if (auto* sharer = module.as<SharerImpl>())
    sharer->fill();
  else
    reset_parameters(module);
}

nn::Sequential sharers() {
  const at::Tensor shared = torch::empty({4, 3}, torch::kMeta);
  nn::Sequential net(Sharer(shared, 0.1), nn::Linear(3, 3), Sharer(shared, 100));
  to_meta(*net);
  return net;
}

std::map<std::string, at::Tensor> state_of(const nn::Module& net) {
  std::map<std::string, at::Tensor> all;
  for (const NamedTensor& entry : named_tensors(net)) all[entry.name] = whole(entry.tensor).clone();
  return all;
}

void expect_state(const nn::Module& net, const std::map<std::string, at::Tensor>& expected,
                  const std::string& where) {
  const auto got = state_of(net);
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(got.at(name).equal(value)) << where << name;
}

template <class E, class Call>
std::string why(const Call& call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool says(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

}  // namespace

// By reset_parameters(), children first, with the draws of a program that has memory for it.
TEST(DeferredMeta, MaterializedIsAsInitialisedInMemory) {
  Layers expected, net;
  const at::Tensor before = net->conv->weight.clone();
  torch::manual_seed(4);
  for (const auto& child : expected->children()) {
    for (const auto& inner : child->children()) reset_parameters(*inner);
    reset_parameters(*child);
  }
  to_meta(*net);
  defer(*net);
  for (const NamedTensor& entry : named_tensors(*net)) EXPECT_TRUE(is_deferred(entry.tensor));
  torch::manual_seed(4);
  materialize(*net);
  expect_state(*net, state_of(*expected), "");
  EXPECT_FALSE(net->conv->weight.equal(before));
  EXPECT_TRUE(net->slopes->weight.eq(0.5).all().item<bool>());
  EXPECT_TRUE(net->table->weight[1].eq(0).all().item<bool>());
  for (const at::Tensor& p : net->parameters())
    EXPECT_TRUE(!p.is_meta() && p.requires_grad() && p.is_leaf());
  EXPECT_TRUE(net->head->forward(net->table->forward(torch::tensor({1, 2}))).defined());
}

TEST(DeferredMeta, ValuesDependOnNeitherRanksNorPlacements) {
  const auto made = [](DistributedManager& manager, int way) {
    manual_seed(manager, 6);
    set_policies(manager, {.redistribution = Policy::error});
    Layers net;
    to_meta(*net);
    defer(*net);
    Draw draw(8);
    const auto mesh = manager.mesh(draw.mesh(manager.world_size()));
    if (way == 0) {
      distribute_module(*net, mesh, [&](const std::string&, const at::Tensor& t) {
        return std::optional(
            ParameterPlacement{draw.spec(mesh, t.sizes().vec(), false).placements()});
      });
    } else if (way == 1) {
      fully_shard(*net, mesh, {.coalesce_bytes = 0});
    } else {
      materialize(named_tensors(*net), mesh);
      for (const at::Tensor& p : net->parameters())
        EXPECT_TRUE(!is_sharded(p) && p.is_leaf() && p.requires_grad());
    }
    for (const at::Tensor& p : net->parameters()) EXPECT_FALSE(is_deferred(p) || p.is_meta());
    return std::pair(state_of(*net), random_state(manager));
  };
  std::map<std::string, at::Tensor> expected;
  RandomState after;
  run_threads(1, [&](DistributedManager& one) { std::tie(expected, after) = made(one, 0); });
  for (const int ranks : {1, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      for (const int way : {0, 1, 2}) {
        const auto [got, random] = made(manager, way);
        EXPECT_EQ(random, after);
        ASSERT_EQ(got.size(), expected.size());
        for (const auto& [name, value] : expected)
          EXPECT_TRUE(got.at(name).equal(value)) << ranks << " ranks, way " << way << ": " << name;
      }
    });
  }
}

// As in constructors, of which the second draws a weight that the first one's replaces.
TEST(DeferredMeta, ASharedWeightIsWhatTheFirstWroteAndDrawsHaveTheirNumbers) {
  auto net = sharers();
  defer(*net, fill_sharers);
  torch::manual_seed(3);
  materialize(*net);
  torch::manual_seed(3);
  const at::Tensor shared = torch::empty({4, 3}).normal_(0, 0.1);
  const at::Tensor bias = torch::empty({3}).uniform_(-0.1, 0.1);
  const nn::Linear middle(3, 3);
  const at::Tensor thrown = torch::empty({4, 3}).normal_(0, 100);
  const at::Tensor last = torch::empty({3}).uniform_(-100, 100);
  const auto state = state_of(*net);
  EXPECT_TRUE(state.at("0.weight").equal(shared) && state.at("2.weight").equal(shared));
  EXPECT_TRUE(state.at("0.bias").equal(bias) && state.at("2.bias").equal(last));
  EXPECT_TRUE(state.at("1.weight").equal(middle->weight));
  EXPECT_TRUE(net[0]->as<SharerImpl>()->weight.is_same(net[2]->as<SharerImpl>()->weight));
}

// Each rank has a part of one recording, or nothing: values are those of the whole, a tensor of two
// parts is equal on both, and random numbers go on alike.
TEST(DeferredMeta, PartsThatARankHasAloneAreThoseOfTheWhole) {
  std::map<std::string, at::Tensor> expected;
  at::Tensor next;
  run_threads(1, [&](DistributedManager& one) {
    manual_seed(one, 2);
    auto net = sharers();
    defer(*net, fill_sharers);
    const auto mesh = one.mesh({{"x", 1}});
    distribute_module(*net, mesh);
    expected = state_of(*net);
    next = whole(tessera::randn(ShardSpec(mesh, {5}, {Replicate()}))).clone();
  });
  on_ranks(4, [&](DistributedManager& manager) {
    manual_seed(manager, 2);
    const auto mesh = manager.mesh(mapped({{"x", 4}}));
    auto net = sharers();
    defer(*net, fill_sharers);
    std::vector<NamedTensor> mine;
    for (const NamedTensor& entry : named_tensors(*net))
      if (entry.name.starts_with(std::to_string(manager.rank()))) mine.push_back(entry);
    materialize(mine, mesh);
    for (const NamedTensor& entry : named_tensors(*net)) {
      const bool has = entry.name.starts_with(std::to_string(manager.rank())) ||
                       (manager.rank() % 2 == 0 && entry.name == "0.weight") ||
                       (manager.rank() % 2 == 0 && entry.name == "2.weight");
      EXPECT_EQ(!is_deferred(entry.tensor), has && manager.rank() < 3) << entry.name;
      if (!is_deferred(entry.tensor)) {
        EXPECT_TRUE(entry.tensor.equal(expected.at(entry.name))) << entry.name;
      }
    }
    const at::Tensor drawn = tessera::randn(ShardSpec(mesh, {5}, {Shard(0)}));
    EXPECT_TRUE(whole(drawn).equal(next));
    materialize(mine, mesh);  // again: nothing is deferred
    EXPECT_TRUE(mine.empty() || !is_deferred(mine[0].tensor));
  });
}

// What a tied weight or a replica is drawn from is the same on all ranks, after a failure too.
TEST(DeferredMeta, RanksOfOtherSeedsAreRefusedAndAFailureDrawsNothing) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const auto make = [] { return nn::Linear(3, 4); };
    nn::Linear net = deferred(make), lost = deferred(make), expected = deferred(make);
    manual_seed(manager, static_cast<std::uint64_t>(manager.rank()));
    EXPECT_TRUE(says(why<MismatchError>([&] { materialize(named_tensors(*net), mesh); }),
                     "the seed 0 on rank 0 and 1 on rank 1"));
    EXPECT_TRUE(is_deferred(net->weight));
    manual_seed(manager, 5);
    const RandomState before = random_state(manager);
    if (manager.rank() == 1)
      set_source(lost->weight, "the weight", [](const ShardSpec*, c10::Device) -> at::Tensor {
        throw InvalidArgument("the weight is nowhere");
      });
    EXPECT_TRUE(says(why<InvalidArgument>([&] { materialize(named_tensors(*lost), mesh); }),
                     "the weight is nowhere"));
    EXPECT_TRUE(is_deferred(lost->weight) && is_deferred(lost->bias));
    EXPECT_EQ(random_state(manager), before);
    materialize(named_tensors(*expected), mesh);
    manual_seed(manager, 5);
    materialize(named_tensors(*net), mesh);
    EXPECT_TRUE(net->weight.equal(expected->weight) && net->bias.equal(expected->bias));
  });
}

TEST(DeferredMeta, WhatNothingHasWrittenToIsNamed) {
  struct OwnImpl : nn::Module {
    OwnImpl() {
      register_parameter("weight", torch::empty({3, 4}, torch::kMeta));
      register_buffer("positions", torch::empty({5}, torch::kMeta));
    }
  };
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net = std::make_shared<OwnImpl>();
    defer(*net);
    const auto places = [&] { distribute_module(*net, mesh, {{"*", {{Shard(0)}}}}); };
    EXPECT_TRUE(says(why<InvalidArgument>(places), "'weight' was on the meta device"));
    EXPECT_TRUE(says(why<InvalidArgument>([&] { fully_shard(*net, mesh); }), "'weight'"));
    EXPECT_TRUE(says(why<InvalidArgument>([&] { materialize(*net); }), "'weight'"));
    // Of two recordings none is filled, whichever comes first.
    const at::Tensor other = deferred([] { return torch::ones({2}); });
    EXPECT_THROW(materialize({other, net->parameters()[0]}), InvalidArgument);
    EXPECT_TRUE(is_deferred(other));
    EXPECT_TRUE(
        says(why<InvalidArgument>([&] { materialize(named_tensors(*net), mesh); }), "'weight'"));
    const torch::NoGradGuard no_grad;
    at::Tensor weight = net->parameters()[0];
    // A part of it, what reads it, and what is made of it say nothing.
    weight[0].fill_(1);
    weight.mul_(2);
    EXPECT_TRUE(says(why<InvalidArgument>(places), "'weight'"));
    weight.copy_(net->buffers()[0].narrow(0, 0, 4));
    EXPECT_TRUE(says(why<InvalidArgument>(places), "'positions'"));
    // One rank alone: told to both, and everything stays deferred.
    if (manager.rank() == 0) weight.fill_(3);
    if (manager.rank() == 0) net->buffers()[0].zero_();
    EXPECT_TRUE(
        says(why<InvalidArgument>([&] { materialize(named_tensors(*net), mesh); }), "rank 1"));
    EXPECT_TRUE(is_deferred(weight));
    if (manager.rank() == 1) weight.fill_(3);
    if (manager.rank() == 1) net->buffers()[0].zero_();
    // A view with more elements than the memory has.
    EXPECT_TRUE(is_deferred(weight.unsqueeze(0).expand({2, 3, 4})));
    places();
    EXPECT_TRUE(whole(net->parameters()[0]).eq(3).all().item<bool>());
  });
}

// As torch::jit::load() gives it on the meta device.
TEST(DeferredMeta, TensorsOfAScriptGetTheirValuesByHand) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::jit::Module script("script");
    script.register_parameter("weight", torch::empty({3, 4}, torch::kMeta), /*is_buffer=*/false);
    at::Tensor weight = script.attr("weight").toTensor();
    defer({{"weight", weight, true}});
    const auto place = [&] {
      distribute_module(script, mesh, [](const std::string&, const at::Tensor&) {
        return std::optional(ParameterPlacement{std::vector<Placement>{Shard(0)}});
      });
    };
    EXPECT_TRUE(says(why<InvalidArgument>(place), "'weight' was on the meta device"));
    weight.fill_(2);
    place();
    EXPECT_TRUE(is_sharded(weight) && whole(weight).eq(2).all().item<bool>());
  });
}

TEST(DeferredMeta, MistakesAreTold) {
  nn::Linear real(3, 4), half(3, 4);
  EXPECT_TRUE(says(why<InvalidArgument>([&] { defer(*real); }), "no parameter or buffer"));
  // A module that has values beside is not initialised, which would change them.
  half->bias.unsafeGetTensorImpl()->shallow_copy_from(
      torch::empty({4}, torch::kMeta).getIntrusivePtr());
  const at::Tensor kept = half->weight.clone();
  defer(*half);
  EXPECT_TRUE(half->weight.equal(kept) && is_deferred(half->bias));
  EXPECT_TRUE(says(why<InvalidArgument>([&] { materialize(*half); }), "'bias'"));
  // By an exception everything is as it was.
  nn::Linear meta(3, 4);
  to_meta(*meta);
  EXPECT_THROW(defer(*meta,
                     [](nn::Module& m) {
                       reset_parameters(m);
                       throw std::runtime_error("mine");
                     }),
               std::runtime_error);
  EXPECT_TRUE(meta->weight.is_meta() && !is_deferred(meta->weight));
  EXPECT_THROW(defer(*meta, {}), InvalidArgument);
  {
    const DeferredScope scope;
    EXPECT_THROW(defer(*meta), InvalidArgument);
  }
  EXPECT_THROW(defer(*meta,
                     [](nn::Module& m) {
                       if (m.parameters()[0].sum().item<float>() > 0) reset_parameters(m);
                     }),
               NotAvailable);
  defer(*meta);
  defer(*meta);  // twice: nothing is left to do
  torch::manual_seed(1);
  materialize(*meta);
  torch::manual_seed(1);
  EXPECT_TRUE(meta->weight.equal(nn::Linear(3, 4)->weight));
  // Two tensors in one memory.
  struct Views : nn::Module {
    Views() {
      const at::Tensor both = torch::empty({6}, torch::kMeta);
      register_parameter("a", both.narrow(0, 0, 3));
      register_parameter("b", both.narrow(0, 3, 3));
    }
  } views;
  EXPECT_TRUE(says(why<InvalidArgument>([&] { defer(views); }), "'b' and 'a'"));
}

// What computes, reduces or optimizes names what has no values, and nothing has changed then.
TEST(DeferredMeta, WhatNeedsValuesNamesWhatHasNone) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net = deferred([] { return nn::Sequential(nn::Linear(3, 4), nn::Linear(4, 1)); });
    nn::Sequential meta(nn::Linear(3, 4));
    to_meta(*meta);
    EXPECT_TRUE(says(why<InvalidArgument>([&] { DistributedDataParallel(net, manager.world()); }),
                     "'0.weight' is deferred and has no values yet"));
    EXPECT_TRUE(says(why<InvalidArgument>([&] { DistributedDataParallel(meta, manager.world()); }),
                     "'0.weight' is on the meta device"));
    EXPECT_TRUE(says(why<ShardingError>([&] { fully_shard(*meta, mesh); }), "call tessera::defer"));
    EXPECT_TRUE(
        says(why<InvalidArgument>([&] { materialize(named_tensors(*meta), mesh); }), "'0.weight'"));
    // A forward pass, in memory and on shards.
    EXPECT_TRUE(says(why<NotAvailable>([&] { net->forward(torch::ones({2, 3})); }), "'0.bias'"));
    const at::Tensor x = distribute_tensor(at::ones({2, 3}), mesh, {Shard(0)});
    EXPECT_ANY_THROW(net->forward(x));
    EXPECT_THROW(net->parameters()[1].square().sum().backward(), NotAvailable);
    // One rank alone.
    nn::Linear mixed(3, 4);
    if (manager.rank() == 1) mixed = deferred([] { return nn::Linear(3, 4); });
    EXPECT_THROW(DistributedDataParallel(mixed, manager.world()), MismatchError);
    const auto steps = [&](const std::vector<at::Tensor>& parameters) {
      ShardedOptimizer<torch::optim::Adam> optimizer(parameters, mesh,
                                                     torch::optim::AdamOptions(0.1));
      optimizer.step();
    };
    EXPECT_TRUE(says(why<InvalidArgument>([&] { steps(net->parameters()); }), "no values yet"));
    EXPECT_THROW(steps(mixed->parameters()), MismatchError);
    // What was refused can be placed still.
    fully_shard(*net, mesh);
    net->forward(x).sum().backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

}  // namespace tessera::test::deferred_meta_test
