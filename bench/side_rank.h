#pragma once
// What ranks in C++ of the benchmarks with two sides share (sides.h; side_rank.py is their like in
// Python): numbers, a transformer's block, and what a rank says to the driver.

#include <time.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>

namespace tessera::bench {

/// Numbers that both languages make alike.
inline at::Tensor pattern(at::IntArrayRef shape, double phase) {
  return torch::sin(torch::arange(c10::multiply_integers(shape), torch::kDouble) * 0.7 + phase)
      .to(torch::kFloat)
      .view(shape);
}

/// The same parameters in both languages.
inline void fill(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (auto& p : module.parameters())
    p.copy_(pattern(p.sizes(), phase += 1) *
            (p.dim() > 1 ? 1.0 / std::sqrt(p.numel() / p.size(0)) : 0.1));
}

/// Features of a head.
inline constexpr std::int64_t kHeadSize = 16;

/// A transformer's block of heads of kHeadSize features, of (batch, length, width).
struct BlockImpl : torch::nn::Module {
  using Linear = torch::nn::Linear;
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
      return layer(normal).unflatten(-1, {-1, kHeadSize}).transpose(1, 2);
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

/// How the bytes of tensors are counted.
struct Peak {
  std::function<void()> restart;
  /// The most at a time since then.
  std::function<std::int64_t()> bytes;
};

/// Steps as the driver says, until the end of input. `loss`: of the last step; not timed. `settle`
/// waits for what a device has been given.
inline void serve(
    const std::function<void()>& step, const std::function<double()>& loss, const Peak& peak = {},
    const std::function<void()>& settle = [] {}) {
  const auto cpu = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  };
  for (int i = 0; i < 5; ++i) step();
  std::printf("ready %.9g\n", loss());
  std::fflush(stdout);
  for (int steps = 0; std::cin >> steps;) {
    if (peak.restart) peak.restart();
    settle();
    const double computed = cpu();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) step();
    settle();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double seconds = cpu() - computed;
    const std::int64_t bytes = peak.bytes ? peak.bytes() : 0;
    std::printf("%.9g %.9g %.9g %lld\n", took.count(), loss(), seconds,
                static_cast<long long>(bytes));
    std::fflush(stdout);
  }
}

}  // namespace tessera::bench
