#pragma once
// A small transformer of any shape, and how its layers are sharded.

#include <torch/torch.h>

#include "support.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::test::tensor_parallel_test {

struct Shape {
  std::int64_t width = 6, heads = 4, groups = 4, size = 2, hidden = 13, vocabulary = 11;
  std::int64_t length = 5, blocks = 2;
  bool fused = false, gated = false, bias = true, tied = false;
  // No norm before the head: the residual is Partial there, and so is its gradient.
  bool bare = false;
  double dropout = 0;
};

using torch::nn::Linear;
using torch::nn::LinearOptions;

inline Linear linear(std::int64_t in, std::int64_t out, bool bias) {
  return Linear(LinearOptions(in, out).bias(bias));
}

// `groups` heads of keys and values, each for heads / groups heads of queries.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const Shape& s) : shape(s) {
    const std::int64_t own = s.groups * s.size;
    if (s.fused) {
      qkv = register_module("qkv", linear(s.width, s.heads * s.size + 2 * own, s.bias));
    } else {
      query = register_module("query", linear(s.width, s.heads * s.size, s.bias));
      key = register_module("key", linear(s.width, own, s.bias));
      value = register_module("value", linear(s.width, own, s.bias));
    }
    out = register_module("out", linear(s.heads * s.size, s.width, s.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const std::int64_t b = x.size(0), t = x.size(1), each = shape.heads / shape.groups * shape.size;
    at::Tensor q, k, v;
    if (shape.fused) {
      // of a group: its queries, its key, its value
      const at::Tensor all = qkv(x).unflatten(-1, {shape.groups, each + 2 * shape.size});
      q = all.narrow(-1, 0, each).reshape({b, t, shape.heads, shape.size});
      k = all.narrow(-1, each, shape.size);
      v = all.narrow(-1, each + shape.size, shape.size);
    } else {
      q = query(x).view({b, t, shape.heads, shape.size});
      k = key(x).view({b, t, shape.groups, shape.size});
      v = value(x).view({b, t, shape.groups, shape.size});
    }
    const at::Tensor y = at::scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, /*is_causal=*/true, {},
        /*enable_gqa=*/shape.heads != shape.groups);
    return out(y.transpose(1, 2).flatten(2));
  }
  Shape shape;
  Linear qkv = nullptr, query = nullptr, key = nullptr, value = nullptr, out = nullptr;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Shape& s) : dropout(s.dropout) {
    const torch::nn::LayerNormOptions norm({s.width});
    first = register_module("first", torch::nn::LayerNorm(norm));
    second = register_module("second", torch::nn::LayerNorm(norm));
    attention = register_module("attention", Attention(s));
    if (s.gated) gate = register_module("gate", linear(s.width, s.hidden, s.bias));
    up = register_module("up", linear(s.width, s.hidden, s.bias));
    down = register_module("down", linear(s.hidden, s.width, s.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + at::dropout(attention(first(x)), dropout, is_training());
    const at::Tensor normal = second(y);
    const at::Tensor inner = gate ? at::silu(gate(normal)) * up(normal) : at::gelu(up(normal));
    return y + at::dropout(down(inner), dropout, is_training());
  }
  double dropout;
  torch::nn::LayerNorm first = nullptr, second = nullptr;
  Attention attention = nullptr;
  Linear gate = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Shape& s) : shape(s) {
    embedding = register_module("embedding", torch::nn::Embedding(s.vocabulary, s.width));
    position = register_module("position", torch::nn::Embedding(s.length, s.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < s.blocks; ++i) blocks->push_back(Block(s));
    if (!s.bare)
      norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({s.width})));
    if (!s.tied) head = register_module("head", linear(s.width, s.vocabulary, false));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens) + position(at::arange(tokens.size(1)));
    x = at::dropout(x, shape.dropout, is_training());
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    if (norm) x = norm(x);
    return head ? head(x) : at::linear(x, embedding->weight);
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& next) {
    return at::cross_entropy_loss(forward(tokens).flatten(0, 1), next.flatten());
  }
  Shape shape;
  torch::nn::Embedding embedding = nullptr, position = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  Linear head = nullptr;
};
TORCH_MODULE(Transformer);

inline LayerShardings layers_of(const Shape& s) {
  LayerShardings all{{"*.attention.out", row(s.groups)},
                     {"*.up", column()},
                     {"*.down", row()},
                     {"embedding", vocabulary()}};
  if (!s.tied) all.emplace_back("head", vocabulary());
  if (s.gated) all.emplace_back("*.gate", column());
  if (s.fused) {
    all.emplace_back("*.qkv", column(s.groups));
  } else {
    for (const char* name : {"*.query", "*.key", "*.value"})
      all.emplace_back(name, column(s.groups));
  }
  return all;
}

inline Transformer made(const Shape& s) {
  Transformer net(s);
  net->to(at::kDouble);
  fill(*net, 5);
  return net;
}

}  // namespace tessera::test::tensor_parallel_test
