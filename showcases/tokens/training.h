#pragma once
// A small language model of bytes, trained data-parallel on a memory-mapped text, that can stop at
// any step and go on with another number of ranks.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/data/loader.h"
#include "tessera/train/strategy.h"

namespace tokens {

/// ASCII: a token is a byte.
inline constexpr std::int64_t vocabulary = 128;

struct Options {
  /// The file, one byte a token.
  std::string text;
  /// The folder to save in, and to go on from if there is something to go on from; empty: neither.
  std::string checkpoint;
  /// Bytes that a sample predicts, each from those before it in the sample.
  std::int64_t row = 64;
  /// Samples of a step, over all ranks.
  std::int64_t batch = 32;
  /// To be done in all, those before a restart included.
  std::int64_t steps = 400;
  std::int64_t save_every = 50;
  std::int64_t hidden = 96;
  double learning_rate = 5e-3;
  std::uint64_t seed = 1;
  int workers = 1;
  bool float64 = false;
};

/// Bytes [n, row] -> logits of the byte after each [n, row, vocabulary].
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(std::int64_t hidden);
  at::Tensor forward(const at::Tensor& bytes);

  torch::nn::Embedding embedding = nullptr;
  torch::nn::GRU recurrent = nullptr;
  torch::nn::Linear output = nullptr;
};
TORCH_MODULE(Model);

/// The samples: rows of row + 1 bytes that overlap by one, so that every byte but the first is
/// predicted once an epoch.
std::shared_ptr<const tessera::Dataset> samples(const Options& options);

struct Step {
  std::uint64_t number;
  std::uint64_t epoch;
  /// Mean over all ranks' samples: nats a byte.
  double loss;
};

/// Trains up to options.steps; `watch` is called after each step. Collective over the strategy's
/// ranks.
Model train(const std::shared_ptr<tessera::Strategy>& strategy, const Options& options,
            const std::function<void(const Step&)>& watch);

/// `length` bytes that the model puts behind `start`, drawn by its probabilities.
std::string continue_text(Model& model, const std::string& start, int length, std::uint64_t seed);

}  // namespace tokens
