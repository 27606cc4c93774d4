// Whole modules on sharded data: values and gradients of one process, with plain or distributed
// parameters, sharded or not.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::modules_test {

namespace {

// A transformer block: attention, norms, MLP, as a user writes it.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int width, int heads_)
      : heads(heads_),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(3 * width, width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto b = x.size(0), s = x.size(1), w = x.size(2);
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto split = [&](const at::Tensor& t) {
      return t.view({b, s, heads, w / heads}).transpose(1, 2);
    };
    const at::Tensor a =
        at::scaled_dot_product_attention(split(parts[0]), split(parts[1]), split(parts[2]));
    const at::Tensor y = x + out(a.transpose(1, 2).reshape({b, s, w}));
    return y + down(at::gelu(up(norm(y))));
  }
  int heads;
  torch::nn::Linear qkv, out, up, down;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Block);

struct MlpImpl : torch::nn::Module {
  MlpImpl()
      : up(register_module("up", torch::nn::Linear(4, 7))),
        down(register_module("down", torch::nn::Linear(7, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

using Shape = std::vector<std::int64_t>;

struct Outcome {
  at::Tensor loss, output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class Module>
Outcome run(Module& net, const at::Tensor& x) {
  Outcome o;
  o.output = net->forward(x);
  o.loss = o.output.square().mean();
  o.loss.backward();
  o.input_gradient = x.grad();
  for (const auto& p : net->parameters()) o.gradients.push_back(p.grad());
  return o;
}

template <class Make>
void compare(const char* name, Make make, const Shape& shape,
             const std::vector<Placement>& placements, const ShardSizes& sizes,
             const std::vector<Axis>& axes, bool distributed = true, const ModuleRule& rule = {}) {
  int ranks = 1;
  for (const Axis& a : axes) ranks *= a.size;
  on_threads(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh(mapped(axes));
    auto expected_net = make(), net = make();
    expected_net->to(at::kDouble);
    net->to(at::kDouble);
    fill(*expected_net, 7);
    fill(*net, 7);
    const at::Tensor value = randn(shape, at::kDouble);
    const at::Tensor plain = value.clone().requires_grad_(true);
    const Outcome expected = run(expected_net, plain);
    if (distributed) distribute_module(*net, mesh, rule);
    const Outcome got = run(net, leaf(value, ShardSpec(mesh, shape, placements, sizes)));
    EXPECT_LT(difference(got.loss, expected.loss), 1e-11) << name;
    EXPECT_LT(difference(got.output, expected.output), 1e-11) << name;
    EXPECT_LT(difference(got.input_gradient, expected.input_gradient), 1e-11) << name;
    for (std::size_t i = 0; i < got.gradients.size(); ++i) {
      EXPECT_LT(difference(got.gradients[i], expected.gradients[i]), 1e-11)
          << name << " parameter " << i;
      if (distributed) {
        EXPECT_TRUE(spec(got.gradients[i]) == spec(net->parameters()[i]))
            << name << " parameter " << i;
      }
    }
    // Buffers such as running statistics.
    const auto buffers = net->buffers(), expected_buffers = expected_net->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i)
      EXPECT_LT(difference(buffers[i], expected_buffers[i]), 1e-11) << name << " buffer " << i;
  });
}

const std::vector<Axis> kThree = {{"data", 3}};
const ShardSizes kUneven = {{0, {3, 0, 2}}};

}  // namespace

TEST(ShardedData, Mlp) {
  for (const bool distributed : {false, true})
    compare("mlp", [] { return Mlp(); }, {5, 4}, {Shard(0)}, kUneven, kThree, distributed);
}

TEST(ShardedData, ConvolutionsAndBatchNorm) {
  const auto make = [] {
    return torch::nn::Sequential(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1).bias(false)),
        torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
        torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 3, 3)), torch::nn::AdaptiveAvgPool2d(1),
        torch::nn::Flatten(), torch::nn::Linear(3, 2));
  };
  for (const bool distributed : {false, true})
    compare("cnn", make, {5, 2, 8, 7}, {Shard(0)}, kUneven, kThree, distributed);
}

TEST(ShardedData, TransformerBlock) {
  for (const bool distributed : {false, true})
    compare(
        "block", [] { return Block(8, 2); }, {5, 4, 8}, {Shard(0)}, kUneven, kThree, distributed);
}

TEST(ShardedData, OverTwoAxes) {
  compare("block", [] { return Block(8, 2); }, {5, 4, 8}, {Shard(0), Shard(0)}, {{0, {2, 0, 1, 2}}},
          {{"a", 2}, {"b", 2}});
}

// Weights that a layer gathers for its backward are not those of a later call.
TEST(ShardedData, RecurrentAfterABackwardThatFailed) {
  on_threads(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 3).batch_first(true));
    lstm->to(at::kDouble);
    fill(*lstm, 5);
    distribute_module(
        *lstm, mesh,
        [](const std::string&, const at::Tensor&) -> std::optional<ParameterPlacement> {
          return ParameterPlacement{{Shard(0)}};
        });
    const at::Tensor rows = distribute_tensor(randn({4, 3}, at::kDouble), mesh, {Shard(0)});
    for (const bool keep_graph : {false, true}) {
      at::Tensor x = leaf(randn({4, 5, 4}, at::kDouble), ShardSpec(mesh, {4, 5, 4}, {Shard(0)}));
      bool fails = true;
      x.register_hook([&fails](const at::Tensor& g) {
        if (fails) throw std::runtime_error("a hook of the program");
        return g;
      });
      const at::Tensor loss = std::get<0>(lstm(x)).square().sum();
      EXPECT_ANY_THROW(loss.backward({}, keep_graph));
      {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& w : lstm->parameters()) {
          if (w.dim() != 2 || w.size(1) != 3) continue;
          w.data().add_(1);  // which w's own version does not count
          EXPECT_LT(difference(at::linear(rows, w), at::linear(full_tensor(rows), full_tensor(w))),
                    1e-12);
          w.data().sub_(1);
        }
      }
      if (!keep_graph) continue;
      fails = false;
      std::size_t calls[2];
      for (std::size_t& n : calls) {
        const CommTraceScope trace(manager);
        loss.backward({}, true);
        n = trace->events().size();
      }
      EXPECT_EQ(calls[0], calls[1]) << "what the backward that failed has gathered is used";
    }
  });
}

TEST(ShardedData, Recurrent) {
  struct NetImpl : torch::nn::Module {
    NetImpl()
        : lstm(register_module("lstm",
                               torch::nn::LSTM(torch::nn::LSTMOptions(4, 5).batch_first(true)))) {}
    at::Tensor forward(const at::Tensor& x) { return std::get<0>(lstm(x)); }
    torch::nn::LSTM lstm;
  };
  compare(
      "lstm", [] { return std::make_shared<NetImpl>(); }, {5, 3, 4}, {Shard(0)}, kUneven, kThree);
}

TEST(TensorParallel, ColumnThenRowOfUnevenWidths) {
  // 7 hidden units over 3 ranks; the activations between are sharded and nothing but the result is
  // reduced.
  const ModuleRule rule = [](const std::string& name,
                             const at::Tensor&) -> std::optional<ParameterPlacement> {
    if (name == "up.weight" || name == "up.bias")
      return ParameterPlacement{{Shard(0)}, {{0, {4, 1, 2}}}};
    if (name == "down.weight") return ParameterPlacement{{Shard(1)}, {{1, {4, 1, 2}}}};
    return std::nullopt;
  };
  compare("mlp", [] { return Mlp(); }, {5, 4}, {Replicate()}, {}, kThree, true, rule);
}

TEST(FullySharded, ParametersOfAnyDimAndSizes) {
  const ModuleRule rule = [](const std::string& name,
                             const at::Tensor& t) -> std::optional<ParameterPlacement> {
    const int d = name.starts_with("down") ? static_cast<int>(t.dim()) - 1 : 0;
    return ParameterPlacement{{Shard(d)}, {{d, {t.size(d) - 1, 0, 1}}}};
  };
  compare("mlp", [] { return Mlp(); }, {5, 4}, {Shard(0)}, kUneven, kThree, true, rule);
  compare("block", [] { return Block(8, 2); }, {5, 4, 8}, {Shard(0)}, kUneven, kThree, true, rule);
}

TEST(ShardedData, TrainingIsThatOfOneProcess) {
  const auto losses = [](DistributedManager* manager) {
    Block net(8, 2);
    net->to(at::kDouble);
    fill(*net, 3);
    at::Tensor x = randn({5, 4, 8}, at::kDouble), y = randn({5, 4, 8}, at::kDouble);
    if (manager) {
      const auto mesh = manager->mesh({{"data", 3}});
      distribute_module(*net, mesh);
      x = distribute_tensor(x, mesh, {Shard(0)}, kUneven);
      y = distribute_tensor(y, mesh, {Shard(0)}, kUneven);
    }
    torch::optim::AdamW opt(net->parameters(), 0.01);
    std::vector<double> all;
    for (int i = 0; i < 8; ++i) {
      opt.zero_grad();
      const at::Tensor loss = torch::mse_loss(net(x), y);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
      opt.step();
      all.push_back(loss.item<double>());
    }
    return all;
  };
  const auto expected = losses(nullptr);
  on_threads(3, [&](DistributedManager& manager) {
    const auto got = losses(&manager);
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], expected[i], 1e-9 * std::abs(expected[i])) << i;
  });
}

TEST(Policies, GathersAreNamedOrForbidden) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    set_policies(manager, {.redistribution = Policy::error});
    EXPECT_NO_THROW(x.cumsum(0));
    EXPECT_NO_THROW(x.softmax(1)) << "moves rows' sums, no shards";
    try {
      x.cumsum(1);
      ADD_FAILURE() << "cumsum along a sharded dim gathers";
    } catch (const ImplicitRedistributionError& e) {
      EXPECT_NE(std::string(e.what()).find("aten::cumsum"), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("Shard(1)"), std::string::npos);
    }
    EXPECT_THROW(at::fft_fft(x), Error);
  });
}

// Rank 0 keeps every loss, and with it the graph: what it finds of it in the next step must not
// change the order in which gradients are reduced.
TEST(PlainParameters, AreReducedInOneOrderWhateverARankKeeps) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const auto layer = [](int in, int out) {
      return torch::nn::Conv1d(torch::nn::Conv1dOptions(in, out, 3).padding(1));
    };
    const auto make = [&] {
      return torch::nn::Sequential(layer(1, 2), torch::nn::Tanh(), layer(2, 2), torch::nn::Tanh(),
                                   layer(2, 1));
    };
    auto net = make(), plain = make();
    for (auto* m : {&net, &plain}) {
      (*m)->to(at::kDouble);
      fill(**m, 1);
    }
    const at::Tensor value = randn({2, 1, 7}, at::kDouble);
    const ShardSpec spec(mesh, {2, 1, 7}, {Shard(2)}, {{2, {5, 2}}});
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      plain->forward(value).square().sum().backward();
      // Kept without a backward, too.
      for (const bool backward : {false, true}) {
        const at::Tensor loss = net->forward(leaf(value, spec)).square().sum();
        if (manager.rank() == 0) kept.push_back(loss);
        if (backward) loss.backward();
      }
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_LT(difference(net->parameters()[i].grad(), plain->parameters()[i].grad()), 1e-10)
            << "parameter " << i << ", step " << step;
      }
    }
  });
}

}  // namespace tessera::test::modules_test
