// Fully sharded parameters on a mesh of data x domain: each rank keeps its rows of every parameter,
// gathered unit by unit ahead of use; samples are sharded over `data`, rows over `domain`.
//
//   tessera run -n 4 -- example_06_fully_sharded
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

int main() {
  using tessera::Shard;
  auto manager = tessera::DistributedManager::initialize();
  const int domain = manager.world_size() % 2 == 0 ? 2 : 1;
  const auto mesh = manager.mesh({{"data", manager.world_size() / domain}, {"domain", domain}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(6, 20), torch::nn::GELU(),
                                 torch::nn::Linear(20, 3));
  };
  auto net = make(), alone = make();
  const auto samples = torch::randn({5, 8, 6});  // samples x rows x features

  tessera::fully_shard(*net, mesh);  // over both axes: 20 rows need not divide evenly
  const auto x = tessera::distribute_tensor(samples, mesh, {Shard(0), Shard(1)});

  torch::optim::AdamW optimizer(net->parameters(), 1e-2), plain(alone->parameters(), 1e-2);
  double apart = 0;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad(), plain.zero_grad();
    const auto loss = net->forward(x).square().mean();
    const auto expected = alone->forward(samples).square().mean();
    loss.backward(), expected.backward();
    optimizer.step(), plain.step();  // the moments are sharded as the parameters are
    apart = std::max(apart, std::abs(loss.item<double>() - expected.item<double>()));
  }
  std::int64_t kept = 0, all = 0;
  for (const auto& p : net->parameters()) {
    kept += tessera::to_local(p).numel();
    all += p.numel();
  }
  std::printf("rank %d keeps %ld of %ld parameters, losses apart by %.1e\n", manager.rank(),
              static_cast<long>(kept), static_cast<long>(all), apart);
  return apart < 1e-12 ? 0 : 1;
}
