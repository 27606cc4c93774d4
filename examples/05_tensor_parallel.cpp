// Tensor parallelism with heads that do not divide: five heads of attention over any number of
// ranks. Which layers are sharded is all that is said; the module is ordinary.
//
//   tessera run -n 3 -- example_05_tensor_parallel
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

constexpr std::int64_t kHeads = 5, kSize = 4, kWidth = 12;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    for (auto* layer : {&query, &key, &value}) *layer = torch::nn::Linear(kWidth, kHeads * kSize);
    out = torch::nn::Linear(kHeads * kSize, kWidth);
    register_module("query", query), register_module("key", key);
    register_module("value", value), register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](torch::nn::Linear& layer) {
      return layer(x).view({x.size(0), x.size(1), kHeads, kSize}).transpose(1, 2);
    };
    const auto q = heads(query), k = heads(key), v = heads(value);
    const auto scores = torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(double(kSize));
    return out(torch::matmul(torch::softmax(scores, -1), v).transpose(1, 2).flatten(2));
  }
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const auto mesh = manager.mesh({{"tensor", manager.world_size()}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  Attention net;
  const auto tokens = torch::randn({2, 7, kWidth});
  const auto expected = net->forward(tokens).detach();

  // Whole heads on each rank: output features of the projections, input features of the output.
  using tessera::column, tessera::row;
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  const auto plan = tensor_parallel(*net, mesh,
                                    {{"query", column(kHeads)},
                                     {"key", column(kHeads)},
                                     {"value", column(kHeads)},
                                     {"out", row(kHeads)}});
  if (manager.rank() == 0) std::printf("%s", plan.to_string().c_str());

  // Nothing moves but the sum at the end: the output is Partial until its value is needed.
  const auto x = tessera::distribute_tensor(tokens, mesh, {tessera::Replicate()});
  const auto y = net->forward(x);
  const double apart = (tessera::full_tensor(y) - expected).abs().max().item<double>();
  std::printf("rank %d: apart by %.1e\n", manager.rank(), apart);
  return apart < 1e-12 ? 0 : 1;
}
