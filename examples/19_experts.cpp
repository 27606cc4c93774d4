// A small language model whose layers are mixtures of experts: sequences are sharded over all
// ranks, the experts of each layer over one axis, and tokens travel to the two that they choose.
// Each step's loss is that of one process.
//
//   tessera run -n 4 -- example_19_experts
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

namespace nn = torch::nn;
constexpr std::int64_t kWords = 17, kLength = 8, kWidth = 16, kSequences = 14;
struct BlockImpl : nn::Module {
  BlockImpl() {
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    first = register_module("first", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    second = register_module("second", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    tessera::ExpertsOptions options{.experts = 6, .features = kWidth, .hidden = 32};
    options.chosen = 2;
    options.capacity = 1.25;  // an expert that more tokens choose leaves the later ones out
    experts = register_module("experts", tessera::Experts(options));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto t = qkv(first(x)).unflatten(-1, {3, 2, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto a = at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true);
    const at::Tensor h = x + a.transpose(1, 2).flatten(2);
    const auto [y, balance] = experts->forward(second(h));
    return {h + y, balance};
  }
  nn::Linear qkv = nullptr;
  nn::LayerNorm first = nullptr, second = nullptr;
  tessera::Experts experts = nullptr;
};
TORCH_MODULE(Block);
struct GptImpl : nn::Module {
  GptImpl() {
    words = register_module("words", nn::Embedding(kWords, kWidth));
    places = register_module("places", nn::Embedding(kLength, kWidth));
    blocks = register_module("blocks", nn::ModuleList(Block(), Block()));
    head = register_module("head", nn::Linear(kWidth, kWords));
    to(torch::kDouble);
  }
  // The mean over all words, and what keeps experts in use alike.
  at::Tensor loss(const at::Tensor& input, const at::Tensor& next) {
    at::Tensor x = words(input) + places(torch::arange(kLength)), uneven = torch::zeros({});
    for (const auto& block : *blocks) {
      const auto [y, balance] = block->as<Block>()->forward(x);
      x = y;
      uneven = uneven + balance;
    }
    return nn::functional::cross_entropy(head(x).flatten(0, 1), next.flatten()) + 0.01 * uneven;
  }
  nn::Embedding words = nullptr, places = nullptr;
  nn::ModuleList blocks = nullptr;
  nn::Linear head = nullptr;
};
TORCH_MODULE(Gpt);
int main() {
  using tessera::Shard;
  auto manager = tessera::DistributedManager::initialize();
  const int ranks = manager.world_size(), experts = ranks % 2 == 0 ? 2 : ranks;
  const auto mesh = manager.mesh({{"data", ranks / experts}, {"expert", experts}});
  torch::manual_seed(0);
  Gpt net;
  torch::manual_seed(0);
  Gpt alone;
  const auto on = tessera::experts_on(mesh);  // six experts over the axis, the rest replicated
  tessera::distribute_module(*net, mesh, {{"*.experts.up", on}, {"*.experts.down", on}});
  torch::optim::Adam optimizer(net->parameters(), 1e-2), other(alone->parameters(), 1e-2);
  double apart = 0, loss = 0;
  for (int step = 0; step < 30; ++step) {
    torch::manual_seed(step);  // the next word is three times this one, and one more
    at::Tensor text = torch::randint(kWords, {kSequences, 1}).repeat({1, kLength + 1});
    for (int i = 1; i <= kLength; ++i) text.select(1, i) = text.select(1, i - 1) * 3 + 1;
    text = text.remainder(kWords);
    const auto mine = tessera::distribute_tensor(text, mesh, {Shard(0), Shard(0)});
    const auto value = net->loss(mine.slice(1, 0, kLength), mine.slice(1, 1));
    const auto expected = alone->loss(text.slice(1, 0, kLength), text.slice(1, 1));
    optimizer.zero_grad(), value.backward(), optimizer.step();
    other.zero_grad(), expected.backward(), other.step();
    loss = value.item<double>();
    apart = std::max(apart, std::abs(loss - expected.item<double>()));
    if (manager.rank() == 0 && step % 10 == 9) std::printf("step %d: loss %.4f\n", step + 1, loss);
  }
  if (manager.rank() == 0) std::printf("losses are apart from one process by %.1e\n", apart);
  return apart < 1e-9 && loss < 1.5 ? 0 : 1;
}
