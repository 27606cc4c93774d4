// Save on one mesh, go on from there on another: started twice with different numbers of ranks, the
// second run loads what the first one saved.
//
//   tessera run -n 3 -- example_10_resume net.safetensors      trains and saves
//   tessera run -n 2 -- example_10_resume net.safetensors      loads and compares
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>

#include "tessera/tessera.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  const std::string path = argv[1];
  auto manager = tessera::DistributedManager::initialize();
  const auto mesh = manager.mesh({{"data", manager.world_size()}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 2));
  // The seven rows of the first weight do not divide evenly over the ranks of either run.
  tessera::distribute_module(*net, mesh, {{"0.weight", {{tessera::Shard(0)}}}});

  const bool resumed = std::filesystem::exists(path);
  manager.world().barrier();  // no rank saves before all have looked
  const auto x = tessera::distribute_tensor(torch::ones({6, 5}), mesh, {tessera::Shard(0)});
  const auto loss = [&] { return net->forward(x).square().mean(); };
  if (resumed) {
    tessera::load(*net, mesh, path);
  } else {
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      loss().backward();
      optimizer.step();
    }
    tessera::save(*net, mesh, path);
  }
  const double value = loss().item<double>();
  if (manager.rank() == 0) {
    std::printf("%s: loss %.12f\n", resumed ? "resumed" : "trained", value);
  }
  return 0;
}
