// Model, pipeline and data groups from two numbers: a layer's features over `mp`, stages over `pp`,
// replicas over `dp`. Here two stages hand over their activations themselves; 12_pipeline has
// schedules. The gradients are those of one process.
//
//   tessera run -n 8 -- example_15_parallel_groups        # any number of ranks
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

constexpr int kHidden = 7;

torch::nn::Sequential network() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(4, kHidden), torch::nn::Tanh(),
                               torch::nn::Linear(kHidden, 1));
}

// Of one replica: other numbers of rows.
std::pair<at::Tensor, at::Tensor> samples(int replica) {
  torch::manual_seed(10 + replica);
  const auto x = torch::randn({3 + replica, 4});
  return {x, x.sum(1, true).sin()};
}

int main() {
  auto manager = tessera::DistributedManager::initialize();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const int ranks = manager.world_size();
  const int model = ranks % 2 == 0 ? 2 : 1, pipeline = ranks % 4 == 0 ? 2 : 1;
  const tessera::ParallelGroups groups(manager, {.model = model, .pipeline = pipeline});
  const bool first = groups.pp.rank == 0, last = groups.pp.rank == pipeline - 1;
  const auto layers = manager.mesh(groups.mesh.mesh().submesh({"mp"}, manager.rank()));

  // The first layer by columns, the second by rows: in a stage only the sum at the end is sent.
  auto alone = network(), whole = network();
  const std::vector<int> cuts = pipeline == 1 ? std::vector<int>{} : std::vector<int>{2};
  auto mine = tessera::split_sequential(whole, cuts)[static_cast<std::size_t>(groups.pp.rank)];
  const auto rule = [](const std::string& name, const at::Tensor&) {
    const bool columns = name == "0.weight" || name == "0.bias", rows = name == "2.weight";
    return std::optional(tessera::ParameterPlacement{{columns ? tessera::Shard(0)
                                                      : rows  ? tessera::Shard(1)
                                                              : tessera::Replicate()}});
  };
  tessera::distribute_module(*mine, layers, rule);
  tessera::DistributedDataParallel net(mine, groups.dp.group);  // averaged over the replicas

  const auto [x, y] = samples(groups.dp.rank);
  at::Tensor h;
  if (first) {
    h = net(tessera::distribute_tensor(x, layers, {tessera::Replicate()}));
  } else {
    // This rank's features of what the stage before has computed.
    const int features = kHidden / model + (groups.mp.rank < kHidden % model);
    const auto like = torch::zeros({x.size(0), features}).requires_grad_();
    const auto received = tessera::functional::receive(groups.pp.group, like, 0);
    h = net(tessera::from_local(received, layers, {tessera::Shard(1)}));
  }
  // What send() returns has no elements: the gradient comes back through it.
  const auto loss = last
                        ? torch::mse_loss(h, y)
                        : tessera::functional::send(groups.pp.group, tessera::to_local(h), 1).sum();
  loss.backward();

  double apart = 0;
  const int replicas = groups.dp.world_size;
  for (int r = 0; r < replicas; ++r) {
    const auto [its_x, its_y] = samples(r);
    (torch::mse_loss(alone->forward(its_x), its_y) / replicas).backward();
  }
  for (const auto& p : mine->named_parameters()) {
    const auto expected = alone->named_parameters()[p.key()].grad();
    const auto off = (tessera::full_tensor(p.value().grad()) - expected).abs().max();
    apart = std::max(apart, off.item<double>());
  }
  if (manager.rank() == 0)
    std::printf("%s: gradients as on one process: %s\n", groups.summary().c_str(),
                apart < 1e-12 ? "yes" : "no");
  return apart < 1e-12 ? 0 : 1;
}
