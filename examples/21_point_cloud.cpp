// A periodic cloud of points with a learned energy, whose gradient are the forces: a network that
// was written for one process runs on points that ranks own. Neighbours within a radius are found
// over all ranks; each layer exchanges ghosts once; energy, forces and the gradients of a loss of
// the forces are those of one process, and forces sum to zero.
//
//   tessera run -n 3 -- example_21_point_cloud        # any number of ranks
#include <torch/torch.h>

#include <cstdio>

#include "tessera/partition/partitioners.h"
#include "tessera/tessera.h"

/// An energy from distances alone. Plain libtorch: it knows no ranks.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int layer = 0; layer < 2; ++layer) {
      const auto mlp = torch::nn::Sequential(torch::nn::Linear(9, 16), torch::nn::SiLU(),
                                             torch::nn::Linear(16, 4));
      layers.push_back(register_module("layer" + std::to_string(layer), mlp));
    }
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& edges, const at::Tensor& shift) {
    const auto from = edges[0], to = edges[1];
    const auto apart = x.index_select(0, from) + shift - x.index_select(0, to);
    const auto distance = (apart.square().sum(1, true) + 1e-3).sqrt();
    auto h = torch::ones_like(x).sum(1, true).expand({-1, 4});
    for (auto& layer : layers) {
      const auto ends = torch::cat({h.index_select(0, from), h.index_select(0, to), distance}, 1);
      h = h + torch::zeros_like(h).index_add(0, to, layer->forward(ends) * (-distance).exp());
    }
    return h.square().sum();
  }
  std::vector<torch::nn::Sequential> layers;
};
TORCH_MODULE(Net);

/// Backward of a loss of the forces; returns the forces.
at::Tensor train(Net& net, const at::Tensor& x, const at::Tensor& edges, const at::Tensor& shift) {
  const auto energy = net->forward(x, edges, shift);
  const auto slope = torch::autograd::grad({energy}, {x}, {}, true, true)[0];
  (slope + x.detach().sin()).square().sum().backward();
  return -slope.detach();
}

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"domain", ranks}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  const std::vector<double> box{1, 1, 1};
  const auto places = torch::rand({200, 3});
  Net net, alone;
  torch::nn::utils::vector_to_parameters(
      torch::nn::utils::parameters_to_vector(net->parameters()).detach(), alone->parameters());

  // Each rank owns the points of a piece of a curve through the box; any owner of any point would
  // do, such as those that a solver has.
  const auto owner = tessera::partition_along_curve(
      {places.data_ptr<double>(), static_cast<std::size_t>(places.numel())}, 3, ranks);
  std::vector<std::int64_t> owned;
  for (std::int64_t i = 0; i < 200; ++i)
    if (owner[static_cast<std::size_t>(i)] == rank) owned.push_back(i);
  const tessera::OwnedRows points(mesh, owned);
  const auto mine = places.index_select(0, torch::tensor(owned, torch::kLong));
  const auto [edges, shift] = tessera::edges_within(points, mine, 0.2, box);
  const auto x = points.shard(mine).requires_grad_();
  tessera::distribute_module(*net, mesh);
  const auto forces = tessera::full_tensor(train(net, x, edges, shift));

  // One process, which has all points in the same order.
  const auto whole = tessera::full_tensor(x.detach()).requires_grad_();
  const auto expected =
      train(alone, whole, tessera::full_tensor(edges), tessera::full_tensor(shift));
  double apart =
      (forces - expected).abs().max().item<double>() / expected.abs().max().item<double>();
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    const auto gradient = tessera::full_tensor(net->parameters()[i].grad());
    const auto theirs = alone->parameters()[i].grad();
    apart = std::max(apart, ((gradient - theirs).abs().max() / theirs.abs().max()).item<double>());
  }
  const double sum = (forces.sum(0).abs().max() / forces.abs().max()).item<double>();
  if (rank == 0)
    std::printf("%s%ld edges; apart by %.1e, forces sum to %.1e of the largest\n",
                points.summary().c_str(), static_cast<long>(edges.size(1)), apart, sum);
  return apart < 1e-10 && sum < 1e-12 ? 0 : 1;
}
