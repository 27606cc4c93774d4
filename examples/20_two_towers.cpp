// A recommender of two towers: users and ads, each with numbers and a bag of categories as in
// Criteo's logs (drawn here). The rows of their tables lie over one axis of the mesh, impressions
// over both: ids travel to the owners of rows, and the rows that are used come back. Each step's
// loss is that of one process.
//
//   tessera run -n 4 -- example_20_two_towers
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

namespace nn = torch::nn;
using tessera::Replicate, tessera::Shard, torch::kDouble, torch::kLong;
constexpr std::int64_t kCategories = 3000, kWidth = 8, kNumbers = 13, kAll = 60;
struct Side {
  at::Tensor numbers, ids, offsets;
};
// Bags of 0 to 4 categories, of which few are common and most are rare.
Side drawn() {
  const at::Tensor sizes = torch::randint(5, {kAll}), ends = sizes.cumsum(0);
  const at::Tensor rare = torch::rand({ends[-1].item<std::int64_t>()}, kDouble).pow(4);
  return {torch::randn({kAll, kNumbers}, kDouble), (rare * kCategories).to(kLong), ends - sizes};
}
// What a rank reads, impressions from `first` to `last`, as its part of those of all.
Side shared(const Side& all, std::int64_t first, std::int64_t last,
            const tessera::DeviceMesh& mesh) {
  const at::Tensor starts = torch::cat({all.offsets, torch::tensor({all.ids.size(0)})});
  const auto begin = starts[first].item<std::int64_t>(), end = starts[last].item<std::int64_t>();
  const auto [ids, offsets] = tessera::bags_from_local(
      all.ids.slice(0, begin, end), all.offsets.slice(0, first, last) - begin, mesh);
  const at::Tensor numbers = all.numbers.slice(0, first, last);
  return {tessera::from_local(numbers, mesh, {Shard(0), Shard(0)}), ids, offsets};
}
struct TowerImpl : nn::Module {
  TowerImpl() {
    nn::EmbeddingBagOptions options(kCategories, kWidth);
    table = register_module("table", nn::EmbeddingBag(options.mode(torch::kSum).sparse(true)));
    layer = register_module("layer", nn::Linear(kNumbers, kWidth));
  }
  at::Tensor forward(const Side& x) { return table(x.ids, x.offsets) + layer(x.numbers).relu(); }
  nn::EmbeddingBag table = nullptr;
  nn::Linear layer = nullptr;
};
TORCH_MODULE(Tower);
struct TwoTowers : nn::Module {
  TwoTowers() { to(kDouble); }
  double step(const Side& u, const Side& a, const at::Tensor& clicks) {
    const at::Tensor score = (user(u) * ad(a)).sum(1);
    const auto loss = nn::functional::binary_cross_entropy_with_logits(score, clicks);
    zero_grad(), loss.backward(), of_tables->step(), of_layers->step();
    return loss.item<double>();
  }
  void start() {  // tables have an optimizer of their own, which touches the rows that were used
    const std::vector<at::Tensor> tables{user->table->weight, ad->table->weight};
    of_tables.emplace(tables, tessera::RowwiseAdagradOptions(0.3));
    auto layers = user->layer->parameters();
    for (const at::Tensor& p : ad->layer->parameters()) layers.push_back(p);
    of_layers.emplace(layers, 1e-2);
  }
  Tower user = register_module("user", Tower()), ad = register_module("ad", Tower());
  std::optional<tessera::RowwiseAdagrad> of_tables;
  std::optional<torch::optim::Adam> of_layers;
};
int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int ranks = manager.world_size(), owners = ranks % 2 == 0 ? 2 : ranks, me = manager.rank();
  const auto mesh = manager.mesh({{"data", ranks / owners}, {"table", owners}});
  torch::manual_seed(0);
  TwoTowers net;
  torch::manual_seed(0);
  TwoTowers alone;
  tessera::distribute_module(net, mesh, {{"*table.weight", {{Replicate(), Shard(0)}}}});
  net.start(), alone.start();
  const auto begin = [&](int rank) { return kAll * rank * rank / (ranks * ranks); };  // uneven
  double apart = 0, loss = 0;
  for (int step = 0; step < 60; ++step) {
    torch::manual_seed(step % 6);
    const Side user = drawn(), ad = drawn();
    const at::Tensor clicks = (user.numbers.select(1, 0) > ad.numbers.select(1, 0)).to(kDouble);
    const auto first = begin(me), last = begin(me + 1);
    const at::Tensor mine = clicks.slice(0, first, last);
    loss = net.step(shared(user, first, last, mesh), shared(ad, first, last, mesh),
                    tessera::from_local(mine, mesh, {Shard(0), Shard(0)}));
    apart = std::max(apart, std::abs(loss - alone.step(user, ad, clicks)));
    if (me == 0 && step % 20 == 19) std::printf("step %d: loss %.4f\n", step + 1, loss);
  }
  if (me == 0) std::printf("losses are apart from one process by %.1e\n", apart);
  return apart < 1e-9 && loss < 0.5 ? 0 : 1;
}
