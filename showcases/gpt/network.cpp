#include "network.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/pipeline/stage.h"
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

std::vector<Part> cut_network(const NetworkOptions& options, int parts) {
  // The embedding is a look-up; the scores cost about as much as half a block of a small network.
  std::vector<double> costs(static_cast<std::size_t>(options.layers) + 2, 1.0);
  costs.front() = 0.1;
  costs.back() = 0.5;
  std::vector<int> ends = tessera::balanced_cuts(costs, parts);
  ends.push_back(static_cast<int>(costs.size()));
  std::vector<Part> all;
  int begin = 0;
  for (const int end : ends) {
    all.push_back({std::max(begin - 1, 0), std::min<std::int64_t>(end - 1, options.layers),
                   begin == 0, end == ends.back()});
    begin = end;
  }
  return all;
}

NetworkImpl::NetworkImpl(const NetworkOptions& given)
    : NetworkImpl(given, std::vector<Part>{{0, given.layers, true, true}}) {}

NetworkImpl::NetworkImpl(const NetworkOptions& given, const std::vector<Part>& parts)
    : options(given) {
  if (options.heads < 1 || options.width % options.heads != 0)
    throw tessera::InvalidArgument(tessera::concat(
        "a width of ", options.width, " does not divide into ", options.heads, " heads"));
  const auto any = [&](const auto& wanted) { return std::ranges::any_of(parts, wanted); };
  const bool embeds = any([](const Part& p) { return p.embeds; }),
             scores = any([](const Part& p) { return p.scores; });
  const at::NoGradGuard no_grad;
  // All are drawn, so that what stays has the same values whatever the parts.
  torch::nn::Embedding tokens(vocabulary, options.width), places(options.length, options.width);
  tokens->weight.mul_(0.1);
  places->weight.mul_(0.1);
  if (embeds || scores) embedding = register_module("embedding", tokens);
  if (embeds) position = register_module("position", places);
  const auto list = register_module("blocks", std::make_shared<torch::nn::Module>("blocks"));
  // Two terms for each layer: their sum does not grow with the number of layers.
  const double scale = 1 / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (std::int64_t i = 0; i < options.layers; ++i) {
    Block block(options);
    block->attention->out->weight.mul_(scale);
    block->down->weight.mul_(scale);
    if (any([&](const Part& p) { return p.begin <= i && i < p.end; }))
      blocks.emplace(i, list->register_module(std::to_string(i), block));
  }
  if (scores) norm = register_module("norm", norm_of(options.width));
}

at::Tensor NetworkImpl::forward(const at::Tensor& tokens) {
  return forward({0, options.layers, true, true}, tokens);
}

at::Tensor NetworkImpl::forward(const Part& part, const at::Tensor& given) {
  at::Tensor x = given;
  if (part.embeds) x = embedding(x) + position(at::arange(x.size(1), at::TensorOptions(at::kLong)));
  for (std::int64_t i = part.begin; i < part.end; ++i) x = blocks.at(i)->forward(x);
  return part.scores ? at::linear(norm(x), embedding->weight) : x;
}

std::shared_ptr<torch::nn::Module> NetworkImpl::layers_of(const Part& part) const {
  const auto layers = std::make_shared<torch::nn::Module>("layers");
  if (part.embeds || part.scores) layers->register_module("embedding", embedding);
  if (part.embeds) layers->register_module("position", position);
  for (std::int64_t i = part.begin; i < part.end; ++i)
    layers->register_module(tessera::concat("block", i), blocks.at(i));
  if (part.scores) layers->register_module("norm", norm);
  return layers;
}

std::string continue_text(const NextScores& next, std::int64_t looked_back,
                          const std::string& start, int count, std::uint64_t seed,
                          const std::function<bool()>& stop) {
  const torch::NoGradGuard no_grad;
  const tessera::KeyedRandom random(seed);
  const auto length = static_cast<std::size_t>(looked_back);
  std::string text = start;
  for (int i = 0; i < count; ++i) {
    if (stop && stop()) break;
    std::vector<std::int64_t> tokens;
    for (std::size_t b = text.size() < length ? 0 : text.size() - length; b < text.size(); ++b)
      tokens.push_back(static_cast<unsigned char>(text[b]) % vocabulary);
    const at::Tensor scores = next(at::tensor(tokens, at::kLong).unsqueeze(0));
    const at::Tensor sums = at::softmax(scores.to(at::kDouble) / 0.8, 0).cumsum(0).contiguous();
    const auto* sum = sums.const_data_ptr<double>();
    const double drawn = random.uniform(static_cast<std::uint64_t>(i)) * sum[vocabulary - 1];
    text += static_cast<char>(std::min<std::ptrdiff_t>(
        std::upper_bound(sum, sum + vocabulary, drawn) - sum, vocabulary - 1));
  }
  return text.substr(start.size());
}

at::Tensor next_scores(Network& network, const at::Tensor& tokens) {
  const at::Tensor scores = network->forward(tokens);
  return (tessera::is_sharded(scores) ? tessera::full_tensor(scores) : scores)[0][-1];
}

}  // namespace gpt
