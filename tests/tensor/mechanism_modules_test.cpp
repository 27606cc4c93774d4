// Modules and optimizers with everything replicated: value, every gradient and every step are those
// of plain libtorch.

#include "mechanism.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::mechanism_modules_test {

namespace {

struct Result {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class Module, class Forward>
Result run(Module& module, const at::Tensor& input, Forward forward) {
  Result r;
  r.output = forward(module, input);
  test::seed(5);
  const at::Tensor weight = randn(r.output.sizes(), at::kDouble);
  (r.output * weight).sum().backward();
  r.input_gradient = input.grad();
  for (const auto& p : module->parameters()) r.gradients.push_back(p.grad());
  return r;
}

// The module with plain input; then with replicated input, its parameters plain or distributed;
// inputs contiguous or transposed in memory.
template <class Make, class Forward>
void compare(const char* name, Make make, const std::vector<std::int64_t>& shape, Forward forward) {
  everywhere([&](DistributedManager&, const DeviceMesh& mesh) {
    for (const bool transposed : {false, true}) {
      for (const bool distributed : {false, true}) {
        auto expected_module = make();
        auto module = make();
        expected_module->to(at::kDouble);
        module->to(at::kDouble);
        fill(*expected_module, 1);
        fill(*module, 1);
        test::seed(2);
        at::Tensor value = randn(shape, at::kDouble);
        if (transposed) value = value.transpose(0, -1).contiguous().transpose(0, -1);
        const at::Tensor plain = value.clone(at::MemoryFormat::Preserve).requires_grad_(true);
        const Result expected = run(expected_module, plain, forward);
        if (distributed) distribute_module(*module, mesh);
        const at::Tensor x = replicated(value, mesh, true);
        ASSERT_EQ(x.strides(), value.strides());
        const Result got = run(module, x, forward);
        const std::string where =
            concat(name, " transposed ", transposed, " distributed ", distributed);
        EXPECT_EQ(got.output.strides(), expected.output.strides()) << where;
        EXPECT_LT(difference(got.output, expected.output), 1e-12) << where;
        EXPECT_LT(difference(got.input_gradient, expected.input_gradient), 1e-12) << where;
        for (std::size_t i = 0; i < got.gradients.size(); ++i) {
          ASSERT_EQ(got.gradients[i].defined(), expected.gradients[i].defined())
              << where << " parameter " << i;
          if (!got.gradients[i].defined()) continue;
          EXPECT_EQ(is_sharded(got.gradients[i]), distributed) << where << " parameter " << i;
          EXPECT_LT(difference(got.gradients[i], expected.gradients[i]), 1e-12)
              << where << " parameter " << i;
        }
      }
    }
  });
}

const auto call = [](auto& module, const at::Tensor& x) { return module->forward(x); };

}  // namespace

TEST(Modules, Linear) {
  compare("Linear", [] { return torch::nn::Linear(6, 3); }, {4, 5, 6}, call);
}
TEST(Modules, Conv2d) {
  compare(
      "Conv2d", [] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)); },
      {2, 3, 5, 4}, call);
}
TEST(Modules, Conv2dCircular) {
  compare(
      "Conv2d circular",
      [] {
        return torch::nn::Conv2d(
            torch::nn::Conv2dOptions(3, 4, 3).padding(1).padding_mode(torch::kCircular));
      },
      {2, 3, 5, 4}, call);
}
TEST(Modules, BatchNorm) {
  compare("BatchNorm2d", [] { return torch::nn::BatchNorm2d(3); }, {4, 3, 5, 4}, call);
}
TEST(Modules, LayerNorm) {
  compare(
      "LayerNorm", [] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})); }, {4, 5, 6},
      call);
}
TEST(Modules, GroupNorm) {
  compare("GroupNorm", [] { return torch::nn::GroupNorm(2, 4); }, {3, 4, 5}, call);
}
TEST(Modules, Lstm) {
  compare(
      "LSTM",
      [] { return torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2).batch_first(true)); },
      {3, 4, 6}, [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
}
TEST(Modules, Gru) {
  compare(
      "GRU", [] { return torch::nn::GRU(torch::nn::GRUOptions(6, 5)); }, {3, 4, 6},
      [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
}
TEST(Modules, MultiheadAttention) {
  compare(
      "MultiheadAttention", [] { return torch::nn::MultiheadAttention(8, 2); }, {5, 3, 8},
      [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x, x, x)); });
}
TEST(Modules, Transformer) {
  compare(
      "TransformerEncoderLayer",
      [] {
        return torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0));
      },
      {5, 3, 8}, call);
}

TEST(Modules, EveryOptimizerTakesTheSameSteps) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const auto train = [&](int kind, bool sharded) {
      torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(),
                                torch::nn::Linear(8, 2));
      net->to(at::kDouble);
      fill(*net, 3);
      at::Tensor x = randn({10, 4}, at::kDouble), y = randn({10, 2}, at::kDouble);
      if (sharded) {
        distribute_module(*net, mesh);
        x = replicated(x, mesh);
        y = replicated(y, mesh);
      }
      std::unique_ptr<torch::optim::Optimizer> opt;
      switch (kind) {
        case 0:
          opt = std::make_unique<torch::optim::SGD>(
              net->parameters(),
              torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
          break;
        case 1:
          opt = std::make_unique<torch::optim::Adam>(net->parameters(),
                                                     torch::optim::AdamOptions(0.01).amsgrad(true));
          break;
        case 2:
          opt = std::make_unique<torch::optim::AdamW>(net->parameters(), 0.01);
          break;
        case 3:
          opt = std::make_unique<torch::optim::RMSprop>(
              net->parameters(), torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5));
          break;
        case 4:
          opt = std::make_unique<torch::optim::Adagrad>(net->parameters(), 0.05);
          break;
        default:
          opt = std::make_unique<torch::optim::LBFGS>(net->parameters(),
                                                      torch::optim::LBFGSOptions(0.5).max_iter(4));
          break;
      }
      for (int i = 0; i < 4; ++i) {
        opt->step([&] {
          opt->zero_grad();
          const at::Tensor loss = torch::mse_loss(net->forward(x), y);
          loss.backward();
          return loss;
        });
      }
      std::vector<at::Tensor> result;
      for (const auto& p : net->parameters()) result.push_back(whole(p));
      return result;
    };
    for (int kind = 0; kind < 6; ++kind) {
      const auto expected = train(kind, false), got = train(kind, true);
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_LT(difference(got[i], expected[i]), 1e-11)
            << "optimizer " << kind << " parameter " << i;
    }
  });
}

}  // namespace tessera::test::mechanism_modules_test
