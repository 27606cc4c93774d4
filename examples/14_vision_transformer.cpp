// A vision transformer on images whose rows are sharded: class token, position embedding, attention
// over all tokens, shifted windows. An operator that would gather is an error here.
//   tessera run -n 3 -- example_14_vision_transformer
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

namespace nn = torch::nn;
// Over dim 1, two heads: on tokens that are sharded, keys and values go round a ring.
struct AttentionImpl : nn::Module {
  explicit AttentionImpl(int dim)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        qkv(register_module("qkv", nn::Linear(dim, 3 * dim))),
        out(register_module("out", nn::Linear(dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto t = qkv(norm(x)).unflatten(-1, {3, 2, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto y = at::scaled_dot_product_attention(t[0], t[1], t[2]);
    return x + out(y.transpose(1, 2).flatten(2));
  }
  nn::LayerNorm norm;
  nn::Linear qkv, out;
};
TORCH_MODULE(Attention);
struct TransformerImpl : nn::Module {
  // Of 4 x 4 points, 8 channels. The shape of the position embedding follows the image.
  explicit TransformerImpl(int patch_count)
      : patches(register_module("patches", nn::Conv2d(nn::Conv2dOptions(3, 8, 4).stride(4)))),
        everywhere(register_module("everywhere", Attention(8))),
        near(register_module("near", Attention(8))),
        head(register_module("head", nn::Linear(8, 2))),
        token(register_parameter("token", torch::randn({1, 1, 8}))),
        positions(register_parameter("positions", torch::randn({1, 1 + patch_count, 8}))) {}
  // Shifted windows of 2 x 2 tokens: rows of windows, which are what is sharded, come first.
  at::Tensor windows(const at::Tensor& field) {
    const auto x = at::roll(field, {-1, -1}, {1, 2});
    const auto w = x.unflatten(2, {-1, 2}).unflatten(1, {-1, 2}).permute({1, 0, 3, 2, 4, 5});
    auto y = near(w.flatten(0, 2).flatten(1, 2)).unflatten(1, {2, 2});
    y = y.unflatten(0, w.sizes().slice(0, 3)).permute({1, 0, 3, 2, 4, 5});
    return at::roll(y.flatten(3, 4).flatten(1, 2), {1, 1}, {1, 2});
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& image) {
    const auto field = patches(image);
    const auto all = field.flatten(2).transpose(1, 2), first = token.expand({all.size(0), -1, -1});
    const auto x = everywhere(at::cat({first, all}, 1) + positions);
    // A slice stays with the rank that has the token; select(1, 0) would send it to all of them.
    return {head(x.narrow(1, 0, 1).sum(1)),
            windows(x.slice(1, 1).unflatten(1, {field.size(2), field.size(3)}))};
  }
  nn::Conv2d patches;
  Attention everywhere, near;
  nn::Linear head;
  at::Tensor token, positions;
};
TORCH_MODULE(Transformer);
int main() {
  auto manager = tessera::DistributedManager::initialize();
  const auto mesh = manager.mesh({{"domain", manager.world_size()}});
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  const auto images = torch::randn({2, 3, 24, 16});
  Transformer alone(24 / 4 * 16 / 4), net(24 / 4 * 16 / 4);
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    net->parameters()[i].detach().copy_(alone->parameters()[i].detach());
  // Whole windows of 2 x 4 rows, uneven on purpose; the class token is the first rank's.
  std::vector<std::int64_t> rows(manager.world_size(), 0);
  rows[0] = 16;
  rows[rows.size() > 1] += 8;
  auto tokens = rows;  // rows / 4 x 16 / 4 patches
  ++tokens[0];
  tessera::distribute_module(*net, mesh, {{"positions", {{tessera::Shard(1)}, {{1, tokens}}}}});
  const auto x = tessera::distribute_tensor(images, mesh, {tessera::Shard(2)}, {{2, rows}});
  const auto y = net->forward(x), expected = alone->forward(images);
  for (const auto& both : {y, expected})
    (both.first.square().mean() + both.second.square().mean()).backward();
  double apart = 0;
  const auto compare = [&](const at::Tensor& t, const at::Tensor& whole) {
    apart = std::max(apart, (tessera::full_tensor(t.detach()) - whole).abs().max().item<double>());
  };
  compare(y.first, expected.first);
  compare(y.second, expected.second);
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    compare(net->parameters()[i].grad(), alone->parameters()[i].grad());
  const auto what = tessera::summary(y.second);
  if (manager.rank() == 0) std::printf("%s, apart by %.0e\n", what.c_str(), apart);
  return apart < 1e-12 && tessera::placements(y.second)[0].is_shard() ? 0 : 1;
}
