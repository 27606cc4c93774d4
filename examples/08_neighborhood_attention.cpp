// Neighbourhood attention on a field whose rows are sharded: each query attends to the 5 x 3
// positions around it, and the keys of neighbouring ranks come by halo.
//
//   tessera run -n 2 -- example_08_neighborhood_attention
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const auto mesh = manager.mesh({{"domain", manager.world_size()}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  // batch x height x width x heads x channels
  const auto make = [] { return torch::randn({1, 12, 6, 2, 4}).requires_grad_(); };
  const at::Tensor q = make(), k = make(), v = make();

  const auto expected = tessera::neighborhood_attention_2d(q, k, v, {5, 3});
  const auto expected_gradient = torch::autograd::grad({expected.square().sum()}, {k})[0];

  // The same call on sharded tensors: rows in uneven shards, the last rank has what is left.
  std::vector<std::int64_t> rows(manager.world_size(), 2);
  rows.back() += 12 - 2 * manager.world_size();
  const auto shard = [&](const at::Tensor& t) {
    const auto s = tessera::distribute_tensor(t.detach(), mesh, {tessera::Shard(1)}, {{1, rows}});
    return s.requires_grad_();
  };
  const at::Tensor sq = shard(q), sk = shard(k), sv = shard(v);
  const auto out = tessera::neighborhood_attention_2d(sq, sk, sv, {5, 3});
  const auto gradient = torch::autograd::grad({out.square().sum()}, {sk})[0];

  const auto apart = [](const at::Tensor& sharded, const at::Tensor& whole) {
    return (tessera::full_tensor(sharded) - whole).abs().max().item<double>();
  };
  const double value = apart(out, expected), grad = apart(gradient, expected_gradient);
  if (manager.rank() == 0) {
    std::printf("%s\nvalues apart by %.1e, gradients of the keys by %.1e\n",
                tessera::summary(out).c_str(), value, grad);
  }
  return value < 1e-12 && grad < 1e-12 ? 0 : 1;
}
