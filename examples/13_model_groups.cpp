// A model says which process groups it needs; the run says how large they are. The loop knows
// neither: it makes them by the model's type, and asks for the replicas by name.
//
//   tessera run -n 4 -- example_13_model_groups
//
// Here half of the ranks shard a field's rows, and the two halves are replicas of the model.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

struct SmoothImpl : torch::nn::Module {
  // The root is the model itself: outside it are its replicas, as many as the world has room for.
  static tessera::ProcessGroupConfig process_groups() {
    tessera::ProcessGroupConfig tree({.name = "smooth", .orthogonal_group = "replicas"});
    tree.add_node({.name = "domain"}, "smooth");
    return tree;
  }
  explicit SmoothImpl(const tessera::DistributedManager& manager) : mesh(manager.mesh("domain")) {
    first = register_module("first", convolution(1, 4));
    second = register_module("second", convolution(4, 1));
    tessera::distribute_module(*this, mesh);
  }
  static torch::nn::Conv2d convolution(int in, int out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  }
  // `sample`: the complete field, of which each rank keeps its rows.
  at::Tensor forward(const at::Tensor& sample) {
    const auto x = tessera::distribute_tensor(sample, mesh, {tessera::Shard(2)});
    return second(torch::tanh(first(x)));
  }
  tessera::DeviceMesh mesh;
  torch::nn::Conv2d first{nullptr}, second{nullptr};
};
TORCH_MODULE(Smooth);

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int domain = manager.world_size() % 2 == 0 ? manager.world_size() / 2 : 1;
  manager.create_process_groups<Smooth>({{"domain", domain}});
  const tessera::Group replicas = manager.group("replicas");

  torch::manual_seed(0);
  Smooth net(manager);
  tessera::DistributedDataParallel ddp(net, replicas);
  torch::optim::SGD optimizer(net->parameters(), 0.2);
  const auto samples = torch::arange(60 * replicas.size()).to(torch::kFloat32).sin();
  const auto sample = samples.view({-1, 1, 10, 6}).narrow(0, replicas.rank(), 1);

  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto y = ddp(sample);
    const auto loss = (y - 1).square().mean();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("rank %d: rank %d of %d of the domain, replica %d of %d: loss %.4f -> %.4f\n",
              manager.rank(), manager.group_rank("domain"), domain, replicas.rank(),
              replicas.size(), first, last);
  // Replicas have one set of parameters.
  const auto weight = tessera::full_tensor(net->second->weight.detach());
  const auto sums = torch::zeros({replicas.size()});
  replicas.all_gather(sums, weight.sum().view({1}));
  const bool same = (sums - sums[0]).abs().max().item<double>() == 0;
  return same && last < first && net->mesh.mesh().size() == domain ? 0 : 1;
}
