#include "network.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/sampling/permutation.h"
#include "tessera/tensor/shard_tensor.h"

namespace gpt {

namespace {

using torch::nn::Linear;

torch::nn::LayerNorm norm_of(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

AttentionImpl::AttentionImpl(const NetworkOptions& options)
    : heads(options.heads), size(options.width / options.heads) {
  qkv = register_module("qkv", Linear(options.width, 3 * options.width));
  out = register_module("out", Linear(options.width, options.width));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const auto parts = qkv(x).unflatten(-1, {heads, 3 * size}).transpose(1, 2).chunk(3, -1);
  const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                        /*is_causal=*/true);
  return out(y.transpose(1, 2).flatten(2));
}

BlockImpl::BlockImpl(const NetworkOptions& options) {
  attention_norm = register_module("attention_norm", norm_of(options.width));
  attention = register_module("attention", Attention(options));
  mlp_norm = register_module("mlp_norm", norm_of(options.width));
  up = register_module("up", Linear(options.width, 4 * options.width));
  down = register_module("down", Linear(4 * options.width, options.width));
  dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor y = x + dropout(attention(attention_norm(x)));
  return y + dropout(down(at::gelu(up(mlp_norm(y)))));
}

NetworkImpl::NetworkImpl(const NetworkOptions& given) : options(given) {
  if (options.heads < 1 || options.width % options.heads != 0)
    throw tessera::InvalidArgument(tessera::concat(
        "a width of ", options.width, " does not divide into ", options.heads, " heads"));
  embedding = register_module("embedding", torch::nn::Embedding(vocabulary, options.width));
  position = register_module("position", torch::nn::Embedding(options.length, options.width));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
  norm = register_module("norm", norm_of(options.width));
  const at::NoGradGuard no_grad;
  embedding->weight.mul_(0.1);
  position->weight.mul_(0.1);
  // Two terms for each layer: their sum does not grow with the number of layers.
  const double scale = 1 / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (const auto& block : *blocks) {
    block->as<Block>()->attention->out->weight.mul_(scale);
    block->as<Block>()->down->weight.mul_(scale);
  }
}

at::Tensor NetworkImpl::forward(const at::Tensor& tokens) {
  const auto places = at::arange(tokens.size(1), at::TensorOptions(at::kLong));
  at::Tensor x = embedding(tokens) + position(places);
  for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
  return at::linear(norm(x), embedding->weight);
}

std::string continue_text(Network& network, const std::string& start, int count,
                          std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const bool training = network->is_training();
  network->eval();
  const tessera::KeyedRandom random(seed);
  const auto length = static_cast<std::size_t>(network->options.length);
  std::string text = start;
  for (int i = 0; i < count; ++i) {
    std::vector<std::int64_t> tokens;
    for (std::size_t b = text.size() < length ? 0 : text.size() - length; b < text.size(); ++b)
      tokens.push_back(static_cast<unsigned char>(text[b]) % vocabulary);
    at::Tensor scores = network->forward(at::tensor(tokens, at::kLong).unsqueeze(0));
    if (tessera::is_sharded(scores)) scores = tessera::full_tensor(scores);
    const at::Tensor sums =
        at::softmax(scores[0][-1].to(at::kDouble) / 0.8, 0).cumsum(0).contiguous();
    const auto* sum = sums.const_data_ptr<double>();
    const double drawn = random.uniform(static_cast<std::uint64_t>(i)) * sum[vocabulary - 1];
    text += static_cast<char>(std::min<std::ptrdiff_t>(
        std::upper_bound(sum, sum + vocabulary, drawn) - sum, vocabulary - 1));
  }
  network->train(training);
  return text.substr(start.size());
}

}  // namespace gpt
