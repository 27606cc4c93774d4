#pragma once
// The network: it sees a coarse relief and draws a fine one. Plain torch::nn.

#include <torch/torch.h>

#include <cstdint>

namespace relief {

struct NetworkOptions {
  /// Channels of the layers on the coarse grid.
  std::int64_t coarse = 16;
  /// And on the fine one.
  std::int64_t fine = 4;
};

/// [1, 1, rows, columns] in km -> [1, 1, factor * (rows - 1) + 1, factor * columns].
struct ReliefNetImpl : torch::nn::Module {
  explicit ReliefNetImpl(const NetworkOptions& options = {});
  at::Tensor forward(const at::Tensor& coarse);

  /// What the network sees of a fine relief: its local means, weighted by a triangle of `factor`
  /// cells to each side.
  at::Tensor coarsen(const at::Tensor& fine);
  /// Between the coarse points linearly: what the network adds to, and what it must beat.
  at::Tensor interpolate(const at::Tensor& coarse);

 private:
  at::Tensor triangle_;  // [1, 1, 2 * factor - 1, 2 * factor - 1], 1 in the middle
  torch::nn::Conv2d first_{nullptr}, second_{nullptr}, last_{nullptr};
  torch::nn::ConvTranspose2d finer_{nullptr};
};
TORCH_MODULE(ReliefNet);

}  // namespace relief
