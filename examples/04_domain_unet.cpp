// Domain parallelism: a small U-Net on an image whose rows are sharded unevenly. Convolution,
// pooling and upsampling get what they need of their neighbours by halo.
//
//   tessera run -n 2 -- example_04_domain_unet
//
// Output and gradients are those of one process with the whole image.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

struct UNetImpl : torch::nn::Module {
  UNetImpl() {
    down = register_module("down", conv(2, 8));
    deep = register_module("deep", conv(8, 8));
    up = register_module("up", conv(16, 2));
  }
  static torch::nn::Conv2d conv(int in, int out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto skip = torch::relu(down(x));
    const auto below = torch::relu(deep(torch::max_pool2d(skip, 2)));
    const auto again = torch::upsample_bilinear2d(below, {x.size(2), x.size(3)}, false);
    return up(torch::cat({skip, again}, 1));
  }
  torch::nn::Conv2d down{nullptr}, deep{nullptr}, up{nullptr};
};
TORCH_MODULE(UNet);

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const auto mesh = manager.mesh({{"domain", manager.world_size()}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  UNet net, alone;
  torch::nn::utils::vector_to_parameters(
      torch::nn::utils::parameters_to_vector(net->parameters()).detach(), alone->parameters());
  const auto image = torch::randn({1, 2, 26, 10});

  // One process with the whole image.
  const auto expected = alone->forward(image);
  expected.square().mean().backward();

  // The same network on rows that are sharded: an operator that would gather them is an error.
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  tessera::distribute_module(*net, mesh);
  std::vector<std::int64_t> rows(manager.world_size(), 4);
  rows[0] += 26 - 4 * manager.world_size();
  const auto x = tessera::distribute_tensor(image, mesh, {tessera::Shard(2)}, {{2, rows}});
  const auto y = net->forward(x);
  y.square().mean().backward();

  double apart = (tessera::full_tensor(y) - expected).abs().max().item<double>();
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    const auto gradient = tessera::full_tensor(net->parameters()[i].grad());
    const auto difference = gradient - alone->parameters()[i].grad();
    apart = std::max(apart, difference.abs().max().item<double>());
  }
  if (manager.rank() == 0) std::printf("%s, apart by %.1e\n", tessera::summary(y).c_str(), apart);
  return apart < 1e-12 && tessera::placements(y)[0].is_shard() ? 0 : 1;
}
