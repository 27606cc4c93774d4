#pragma once
// Batches by length: as many samples of the global order as a budget of tokens allows, and packing
// of short samples into rows. Both go through the order in sequence, so that a saved offset
// suffices for resuming, and every rank that knows the lengths computes the same.

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

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
