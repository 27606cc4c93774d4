#pragma once
// Which sample comes next, beyond one shuffled pass: weighted and class-balanced draws, and
// mixtures of datasets.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/sampling/permutation.h"

namespace tessera {

/// Draws with replacement, index i with probability weight_i / sum. Draw k depends on (seed, k)
/// alone: any draw is computed by itself, in O(1). Alias method (Walker 1977, in the form of Vose
/// 1991).
class WeightedDraws {
 public:
  /// Weights are finite, at least 0, and not all zero. Throws InvalidArgument otherwise.
  WeightedDraws(const std::vector<double>& weights, std::uint64_t seed);
  std::uint64_t operator()(std::uint64_t draw) const;
  std::uint64_t size() const { return threshold_.size(); }

 private:
  KeyedRandom random_;
  std::vector<double> threshold_;
  std::vector<std::uint64_t> alias_;
};

/// One weight per sample, such that each class that occurs is drawn equally often: 1 / (number of
/// samples of its class). Classes are any numbers.
std::vector<double> class_balanced_weights(const std::vector<std::int64_t>& classes);

/// A mixture of datasets: at every point of the sequence each dataset's share is as close to its
/// weight as whole numbers allow (within one sample for constant weights of two datasets; see the
/// docs for more). Each dataset is gone through in its own shuffled order, epoch after epoch.
///
///   Mixture m({{"a", 100}, {"b", 10}}, {{0, {0.75, 0.25}}}, seed);
///   Mixture::Cursor c = m.start();
///   m.next(c) -> {dataset 0, sample ...}; four draws take 3 of a and 1 of b
class Mixture {
 public:
  struct Dataset {
    std::string name;
    std::uint64_t samples;
  };
  /// Weights (>= 0, one per dataset) that hold from draw `from` on.
  struct Stage {
    std::uint64_t from;
    std::vector<double> weights;
  };
  struct Draw {
    int dataset;
    std::uint64_t sample;
    bool operator==(const Draw&) const = default;
  };
  /// The state to save for resuming: a few numbers.
  struct Cursor {
    /// Number of draws so far.
    std::uint64_t drawn = 0;
    /// Number of samples taken from each dataset since the start.
    std::vector<std::uint64_t> taken;
    /// How many samples each dataset is behind its weight.
    std::vector<double> credit;
    bool operator==(const Cursor&) const = default;
  };

  /// Throws InvalidArgument for no dataset, an empty one that has a weight, weights that are not
  /// finite, negative or all zero, and stages that do not ascend from 0.
  Mixture(std::vector<Dataset> datasets, std::vector<Stage> stages, std::uint64_t seed,
          bool shuffle = true);
  Cursor start() const;
  /// Returns the next draw and advances the cursor. Throws InvalidArgument for a cursor of another
  /// mixture.
  Draw next(Cursor& cursor) const;
  /// The next out.size() draws; faster than one by one.
  void next(Cursor& cursor, std::span<Draw> out) const;
  /// Everything that the draws depend on, as text: names, sizes, stages with exact weights, seed.
  std::string describe() const;
  const std::vector<Dataset>& datasets() const { return datasets_; }

 private:
  int choose(Cursor& cursor, const std::vector<double>& weights) const;
  std::uint64_t stream(int dataset, std::uint64_t epoch) const;

  std::vector<Dataset> datasets_;
  std::vector<Stage> stages_;
  std::uint64_t seed_;
  bool shuffle_;
};

// Batches by length: as many samples of the global order as a budget of tokens allows, and packing
// of short samples into rows. Both go through the order in sequence, so that a saved offset
// suffices for resuming, and every rank that knows the lengths computes the same.

/// Length, in tokens, of the sample at a position of the order.
using LengthAt = std::function<std::uint64_t(std::uint64_t position)>;

/// A limit of tokens per batch. `padded`: the cost of a batch is count * longest (what a
/// rectangular batch holds), else the sum of the lengths.
struct TokenBudget {
  std::uint64_t tokens = 0;
  /// Largest number of samples; 0: no limit.
  std::uint64_t max_samples = 0;
  bool padded = false;
};
/// How many samples from `offset` on fit into one batch; at least 1 while offset < end. Throws
/// InvalidArgument if a single sample exceeds the budget (naming it and its length: shorten it or
/// leave it out), or if the budget is 0.
std::uint64_t token_budget_batch(const TokenBudget& budget, std::uint64_t offset, std::uint64_t end,
                                 const LengthAt& length);

/// A sample in a packed row.
struct Packed {
  /// Position of the sample in the order.
  std::uint64_t position;
  /// Token at which it starts in the row.
  std::uint64_t begin;
  std::uint64_t length;
  bool operator==(const Packed&) const = default;
};
/// Packs samples from `offset` on into rows of at most `capacity` tokens, first fit in order of the
/// samples; the batch ends before the first sample that fits in no row. Returns `rows` rows (some
/// may be empty at the end of the order); the number of samples taken is the sum of their sizes.
/// Samples of length 0 are taken and occupy no tokens. Throws InvalidArgument if a single sample
/// exceeds the capacity.
std::vector<std::vector<Packed>> pack_batch(std::uint64_t rows, std::uint64_t capacity,
                                            std::uint64_t offset, std::uint64_t end,
                                            const LengthAt& length);

}  // namespace tessera
