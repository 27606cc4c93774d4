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

inline void train_and_compare(const Group& group, const DistributedDataParallelOptions& options,
                              bool shared, const Net& reference) {
  torch::manual_seed(1 + group.rank());  // overwritten by rank 0's
  Net net(shared);
  DistributedDataParallel ddp(net, group, options);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < kSteps; ++step) {
    auto x = part(samples(step, 13), step, group.rank(), group.size());
    optimizer.zero_grad();
    ddp.mean_loss(torch::mse_loss(ddp(x), target(x)), static_cast<double>(x.size(0))).backward();
    optimizer.step();
  }
  const auto wanted = reference->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(torch::allclose(item.value(), wanted[item.key()], 1e-10, 1e-10))
        << item.key() << " on rank " << group.rank() << " of " << group.size();
    EXPECT_EQ(item.value().grad().defined(), wanted[item.key()].grad().defined()) << item.key();
  }
}

/// A wrapper that one rank keeps, for its log, when all go on with another one. Groups may have
/// ended afterwards.
inline void keep_an_old_wrapper(DistributedManager& manager) {
  const int ranks = manager.world_size();
  torch::nn::Linear net(3, 2);
  using Wrapper = DistributedDataParallel<torch::nn::Linear>;
  const auto step = [&](Wrapper& ddp) {
    net->zero_grad();
    ddp(torch::full({1, 3}, 1.0 + manager.rank())).sum().backward();
  };
  const auto wrapped = [&] { return std::make_unique<Wrapper>(net, manager.world()); };
  auto ddp = wrapped();
  step(*ddp);
  auto kept = manager.rank() == 0 ? std::move(ddp) : nullptr;
  ddp.reset();
  if (ranks > 1) {
    EXPECT_THROW(wrapped(), MismatchError);
  }
  kept.reset();
  ddp = wrapped();
  for (int k = 0; k < 2; ++k) {
    step(*ddp);
    EXPECT_TRUE(net->weight.grad().allclose(torch::full({2, 3}, (ranks + 1) / 2.0)))
        << net->weight.grad();
  }
  // The same, made before the old one goes.
  auto next = wrapped();
  kept = manager.rank() == 0 ? std::move(ddp) : nullptr;
  ddp.reset();
  if (ranks > 1) {
    EXPECT_THROW(step(*next), MismatchError);
  }
}

}  // namespace tessera::testing
