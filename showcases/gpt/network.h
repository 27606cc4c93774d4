#pragma once
// A GPT as anybody would write it: torch::nn modules, and no word of ranks.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

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

/// Some consecutive layers.
struct Part {
  /// Blocks begin .. end - 1.
  std::int64_t begin = 0, end = 0;
  /// The embedding in front of them; the scores behind them.
  bool embeds = false, scores = false;
};

/// The network in so many parts of about equal work. Throws tessera::InvalidArgument where there
/// are fewer layers (the embedding, the blocks, the scores) than parts.
std::vector<Part> cut_network(const NetworkOptions& options, int parts);

/// Tokens [n, length] -> scores of the token after each [n, length, vocabulary]. The embedding
/// scores them too.
struct NetworkImpl : torch::nn::Module {
  /// Throws tessera::InvalidArgument for a width that the heads do not divide.
  explicit NetworkImpl(const NetworkOptions& options);
  /// What these parts need alone, under the names and with the values that it has in the complete
  /// network.
  NetworkImpl(const NetworkOptions& options, const std::vector<Part>& parts);
  at::Tensor forward(const at::Tensor& tokens);
  /// Of one part: tokens or what the part before gives, to what the next one takes or scores.
  at::Tensor forward(const Part& part, const at::Tensor& x);
  /// A module of what one part computes with, shared with this one.
  std::shared_ptr<torch::nn::Module> layers_of(const Part& part) const;

  NetworkOptions options;
  torch::nn::Embedding embedding = nullptr, position = nullptr;
  /// By number.
  std::map<std::int64_t, Block> blocks;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Network);

/// Scores of the byte behind some bytes [1, n], as a plain tensor [vocabulary].
using NextScores = std::function<at::Tensor(const at::Tensor& tokens)>;

/// `count` bytes put behind `start`, drawn by the probabilities that the scores of at most `length`
/// bytes before them give; fewer where `stop` says so before one of them. Collective if the scores
/// are, with the same result on all ranks.
std::string continue_text(const NextScores& scores, std::int64_t length, const std::string& start,
                          int count, std::uint64_t seed, const std::function<bool()>& stop = {});
/// The scores of a complete network, sharded or not.
at::Tensor next_scores(Network& network, const at::Tensor& tokens);

}  // namespace gpt
