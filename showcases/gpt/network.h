#pragma once
// A GPT as anybody would write it: torch::nn modules, and no word of ranks.

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace gpt {

/// ASCII: a token is a byte.
inline constexpr std::int64_t vocabulary = 128;

struct NetworkOptions {
  std::int64_t width = 96;
  std::int64_t heads = 4;
  std::int64_t layers = 4;
  /// Tokens that are looked back on, at most.
  std::int64_t length = 64;
  /// Of what each layer adds.
  double dropout = 0;
};

/// One projection gives query, key and value of each head, head after head.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const NetworkOptions& options);
  at::Tensor forward(const at::Tensor& x);
  std::int64_t heads, size;
  torch::nn::Linear qkv = nullptr, out = nullptr;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const NetworkOptions& options);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::LayerNorm attention_norm = nullptr, mlp_norm = nullptr;
  Attention attention = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;
  torch::nn::Dropout dropout = nullptr;
};
TORCH_MODULE(Block);

/// Tokens [n, length] -> scores of the token after each [n, length, vocabulary]. The embedding
/// scores them too.
struct NetworkImpl : torch::nn::Module {
  /// Throws tessera::InvalidArgument for a width that the heads do not divide.
  explicit NetworkImpl(const NetworkOptions& options);
  at::Tensor forward(const at::Tensor& tokens);
  NetworkOptions options;
  torch::nn::Embedding embedding = nullptr, position = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Network);

/// `count` bytes that the network puts behind `start`, drawn by its probabilities. Collective where
/// its parameters are sharded.
std::string continue_text(Network& network, const std::string& start, int count,
                          std::uint64_t seed);

}  // namespace gpt
