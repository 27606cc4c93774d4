// A graph network on nodes that a table of owners divides, and the edges that point to them: one
// exchange of ghosts a layer; energy, forces and a loss of the forces are those of one process.
//
//   tessera run -n 3 -- example_17_graph        # any number of ranks
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

using Ids = std::vector<std::int64_t>;

/// Messages along edges from distances and both ends' features, summed at the targets; two layers.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int layer = 0; layer < 2; ++layer) {
      const auto mlp = torch::nn::Sequential(torch::nn::Linear(9, 16), torch::nn::SiLU(),
                                             torch::nn::Linear(16, 4));
      layers.push_back(register_module("layer" + std::to_string(layer), mlp));
    }
  }
  // `exchanged`: a node's rows followed by its ghosts'; source and target count in these.
  template <class Exchanged>
  at::Tensor energy(const at::Tensor& positions, const at::Tensor& source, const at::Tensor& target,
                    const Exchanged& exchanged) {
    const auto x = exchanged(positions);
    const auto apart = x.index_select(0, source) - x.index_select(0, target);
    const auto distance = (apart.square().sum(1, true) + 0.1).sqrt();
    auto h = torch::ones({positions.size(0), 4});
    for (auto& layer : layers) {
      const auto all = exchanged(h);
      const auto ends = {all.index_select(0, source), all.index_select(0, target), distance};
      h = h + torch::zeros_like(h).index_add(0, target, layer->forward(torch::cat(ends, 1)));
    }
    return h.square().sum();
  }
  std::vector<torch::nn::Sequential> layers;
};
TORCH_MODULE(Net);

/// Backward of a loss of the forces; returns the forces.
at::Tensor train(const at::Tensor& energy, const at::Tensor& positions) {
  const auto slope = torch::autograd::grad({energy}, {positions}, {}, true, true)[0];
  (slope + positions.detach().sin()).square().sum().backward();
  return -slope.detach();
}

int main() {
  using tessera::local_rows;
  auto manager = tessera::DistributedManager::initialize();
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"domain", ranks}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  constexpr std::int64_t kNodes = 60, kEdges = 400;
  const auto positions = torch::randn({kNodes, 3}).requires_grad_();
  const auto source = torch::randint(kNodes, {kEdges}), target = torch::randint(kNodes, {kEdges});
  const auto owner = torch::randint(ranks, {kNodes});  // a solver's partition: any
  Net net, alone;
  torch::nn::utils::vector_to_parameters(
      torch::nn::utils::parameters_to_vector(net->parameters()).detach(), alone->parameters());
  const auto same = [](const at::Tensor& t) { return t; };
  const auto expected = train(alone->energy(positions, source, target, same), positions);

  // This rank's nodes, the edges that point to them, and the nodes that those come from.
  const auto ids = [](const at::Tensor& t) {
    return Ids(t.data_ptr<std::int64_t>(), t.data_ptr<std::int64_t>() + t.numel());
  };
  const auto own = owner.eq(rank).nonzero().view(-1);
  const auto edges = owner.index_select(0, target).eq(rank).nonzero().view(-1);
  const Ids owned = ids(own), from = ids(source.index_select(0, edges)),
            to = ids(target.index_select(0, edges)), ghosts = tessera::ghosts_of(owned, from);
  const tessera::GhostPlan plan(mesh, owned, ghosts);
  const auto rows = [&](const Ids& i) { return torch::tensor(local_rows(owned, ghosts, i)); };
  const auto mine = positions.detach().index_select(0, own).requires_grad_();
  const auto exchanged = [&](const at::Tensor& t) { return tessera::ghost_exchange(plan, t); };
  const auto forces = train(net->energy(mine, rows(from), rows(to), exchanged), mine);
  double apart = (forces - expected.index_select(0, own)).abs().sum().item<double>();
  const auto all = alone->parameters();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto gradient = net->parameters()[i].grad();  // a summand of each rank
    manager.world().all_reduce(gradient);
    apart = std::max(apart, (gradient - all[i].grad()).abs().max().item<double>() /
                                all[i].grad().abs().max().item<double>());
  }
  std::printf("%sapart by %.1e\n", plan.summary().c_str(), apart);
  return apart < 1e-10 ? 0 : 1;
}
