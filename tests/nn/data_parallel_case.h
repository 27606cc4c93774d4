#pragma once
// One training run on uneven data, on one process and data-parallel: the two must agree to
// round-off.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <utility>

#include "tessera/comm/job/manager.h"
#include "tessera/nn/distributed_data_parallel.h"

namespace tessera::testing {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool shared = false) : shared(shared) {
    a = register_module("a", torch::nn::Linear(6, 8));
    b = register_module("b", torch::nn::Linear(8, 8));
    c = register_module("c", torch::nn::Linear(8, 2));
    unused = register_module("unused", torch::nn::Linear(3, 3));
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(a(x));
    x = torch::tanh(b(x));
    if (shared) x = torch::tanh(b(x));
    return c(x);
  }
  bool shared;
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr}, unused{nullptr};
};
TORCH_MODULE(Net);

inline torch::Tensor samples(int step, std::int64_t n) {
  torch::manual_seed(100 + step);
  return torch::randn({n, 6}, torch::kDouble);
}
inline torch::Tensor target(const torch::Tensor& x) {
  return torch::stack({x.sum(1).sin(), (x * x).sum(1)}, 1);
}

// This rank's rows of a batch of `n`: every rank another number, some none.
inline torch::Tensor part(const torch::Tensor& x, int step, int rank, int ranks) {
  std::vector<std::int64_t> cuts{0};
  for (int r = 1; r < ranks; ++r)
    cuts.push_back(
        std::max(cuts.back(), x.size(0) * ((r * 7 + step * 3) % (2 * ranks)) / (2 * ranks)));
  cuts.push_back(x.size(0));
  return x.slice(0, cuts[rank], cuts[rank + 1]);
}

constexpr int kSteps = 6;

inline Net one_process(bool shared) {
  torch::manual_seed(1);
  Net net(shared);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < kSteps; ++step) {
    auto x = samples(step, 13);
    optimizer.zero_grad();
    torch::mse_loss(net(x), target(x)).backward();
    optimizer.step();
  }
  return net;
}

}  // namespace tessera::testing
