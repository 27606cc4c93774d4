#pragma once
// The network: a few convolutions on the sphere's grid, and a linear way around them.

#include <torch/torch.h>

#include <cstdint>

namespace winds {

/// One ring of cells more on every side: circular in longitude (the last dim), the pole rows
/// repeated in latitude. [.., h, w] -> [.., h + 2, w + 2].
at::Tensor pad_sphere(const at::Tensor& field);

struct NetworkOptions {
  std::int64_t input = 14;
  std::int64_t hidden = 24;
  /// Convolutions of 3 x 3, the last to 2 channels.
  std::int64_t layers = 3;
};

/// [n, input, lat, lon] -> [n, 2, lat, lon]. The first two input channels are the damped anomalies;
/// before training the output equals them.
struct WindNetImpl : torch::nn::Module {
  explicit WindNetImpl(const NetworkOptions& options);
  at::Tensor forward(const at::Tensor& input);

 private:
  torch::nn::Conv2d around_{nullptr};
  torch::nn::ModuleList convolutions_;
};
TORCH_MODULE(WindNet);

}  // namespace winds
