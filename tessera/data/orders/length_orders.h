#pragma once
// Orders by the lengths of samples: batches with a given number of tokens.

#include "tessera/data/orders/order.h"
#include "tessera/sampling/permutation.h"

namespace tessera {

/// Base of the orders below: one dataset whose samples have known lengths, in a new order each
/// epoch. The cursor is {epoch, samples taken of it}.
class LengthOrder : public Order {
 public:
  OrderCursor start() const override;
  std::vector<std::uint64_t> samples_needed() const override;
  void check(const OrderCursor& cursor) const override;

 protected:
  /// Throws InvalidArgument if there is no sample.
  LengthOrder(std::vector<std::uint64_t> lengths, std::uint64_t seed, bool shuffle);
  std::uint64_t samples() const { return lengths_.size(); }
  std::uint64_t longest() const;
  /// The sample at a position of an epoch, and its length.
  class Epoch {
   public:
    Epoch(const LengthOrder& order, std::uint64_t epoch);
    std::uint64_t sample(std::uint64_t position) const;
    std::uint64_t length(std::uint64_t position) const { return order_.lengths_[sample(position)]; }

   private:
    const LengthOrder& order_;
    KeyedPermutation permutation_;
  };
  /// An empty batch at the cursor.
  OrderBatch begin_batch(const OrderCursor& cursor) const;
  /// Advances the cursor by a batch of `taken` samples.
  void end_batch(OrderCursor& cursor, std::uint64_t taken) const;
  /// "70 lengths 123...", for describe().
  std::string describe_lengths() const;
  /// ", seed 1, shuffled".
  std::string describe_seed() const;

 private:
  std::vector<std::uint64_t> lengths_;
  std::uint64_t seed_;
  bool shuffle_;
};

/// Takes as many samples per batch as a token budget allows. `lengths[i]`: tokens of sample i,
/// known on every rank. Throws InvalidArgument for a sample that no batch could hold.
class TokenBudgetOrder : public LengthOrder {
 public:
  TokenBudgetOrder(std::vector<std::uint64_t> lengths, TokenBudget budget, std::uint64_t seed,
                   bool shuffle = true);
  OrderBatch next(OrderCursor& cursor) const override;
  std::string describe() const override;

 private:
  TokenBudget budget_;
};

/// Batches of `rows` rows of `capacity` tokens, packed with complete samples. Throws
/// InvalidArgument for a sample that is longer than a row.
class PackedOrder : public LengthOrder {
 public:
  PackedOrder(std::vector<std::uint64_t> lengths, std::uint64_t rows, std::uint64_t capacity,
              std::uint64_t seed, bool shuffle = true);
  OrderBatch next(OrderCursor& cursor) const override;
  std::string describe() const override;

 private:
  std::uint64_t rows_, capacity_;
};

}  // namespace tessera
