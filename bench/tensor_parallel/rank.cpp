// One rank of bench_tensor_parallel in C++. The model and numbers are those of rank.py.

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "tessera/comm/job/manager.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using torch::nn::Linear;

constexpr std::int64_t kSize = 16;

at::Tensor pattern(at::IntArrayRef shape, double phase) {
  return torch::sin(torch::arange(c10::multiply_integers(shape), torch::kDouble) * 0.7 + phase)
      .to(torch::kFloat)
      .view(shape);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) {
    const torch::nn::LayerNormOptions norm({width});
    first = register_module("first", torch::nn::LayerNorm(norm));
    query = register_module("query", Linear(width, width));
    key = register_module("key", Linear(width, width));
    value = register_module("value", Linear(width, width));
    out = register_module("out", Linear(width, width));
    second = register_module("second", torch::nn::LayerNorm(norm));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& given) {
    const at::Tensor normal = first(given);
    const auto heads = [&](Linear& layer) {
      return layer(normal).unflatten(-1, {-1, kSize}).transpose(1, 2);
    };
    const at::Tensor attended = at::scaled_dot_product_attention(
        heads(query), heads(key), heads(value), {}, 0.0, /*is_causal=*/true);
    const at::Tensor x = given + out(attended.transpose(1, 2).flatten(2));
    return x + down(at::gelu(up(second(x))));
  }
  torch::nn::LayerNorm first = nullptr, second = nullptr;
  Linear query = nullptr, key = nullptr, value = nullptr, out = nullptr, up = nullptr,
         down = nullptr;
};
TORCH_MODULE(Block);

int run(const std::string& model) {
  using tessera::column, tessera::row;
  at::set_num_threads(1);
  auto manager = tessera::DistributedManager::initialize({.backend = "gloo"});
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  const bool sequence = model.ends_with("sequence"), small = model.starts_with("small");
  const std::int64_t width = small ? 64 : 256, length = small ? 32 : 128;
  torch::nn::Sequential net;
  for (int i = 0; i < (small ? 4 : 2); ++i) net->push_back(Block(width));
  {
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& p : net->parameters())
      p.copy_(pattern(p.sizes(), phase += 1) *
              (p.dim() > 1 ? 1 / std::sqrt(static_cast<double>(p.size(1))) : 0.1));
  }
  const auto mesh = manager.mesh({{"tensor", manager.world_size()}});
  const std::int64_t heads = width / kSize;
  tessera::TensorParallelOptions options;
  if (sequence) options.sequence_dim = 1;
  tensor_parallel(*net, mesh,
                  {{"*.query", column(heads)},
                   {"*.key", column(heads)},
                   {"*.value", column(heads)},
                   {"*.out", row(heads)},
                   {"*.up", column()},
                   {"*.down", row()}},
                  options);
  const std::vector<tessera::Placement> lies{sequence ? tessera::Shard(1) : tessera::Replicate()};
  const at::Tensor data = tessera::distribute_tensor(pattern({4, length, width}, 0), mesh, lies),
                   target =
                       tessera::distribute_tensor(pattern({4, length, width}, 0.5), mesh, lies);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(net->forward(data), target);
    loss.backward();
    optimizer.step();
  };
  for (int i = 0; i < 5; ++i) step();
  std::printf("ready %.9g\n", loss.item<double>());
  std::fflush(stdout);
  for (int steps = 0; std::cin >> steps;) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) step();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%.9g %.9g\n", seconds, loss.item<double>());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "small");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_tensor_parallel_rank: %s\n", e.what());
    return 1;
  }
}
