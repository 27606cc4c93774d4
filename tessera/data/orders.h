#pragma once
// Orders: the sequence of global batches that every rank computes alike, and the few numbers from
// which it continues. Derive from Order for one of your own.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/sampling/permutation.h"
#include "tessera/sampling/sample_order.h"
#include "tessera/sampling/sampling.h"

namespace tessera {

/// The position of an order: a few numbers whose meaning belongs to the order. Saved as text by
/// Loader::state().
struct OrderCursor {
  std::uint64_t step = 0;
  /// Empty for orders whose position follows from the step number.
  std::vector<std::uint64_t> position;
  /// The number of samples by which each dataset of a mixture is behind its weight.
  std::vector<double> credit;
  bool operator==(const OrderCursor&) const = default;
};

/// A global batch: `size` rows, of which those from `real` on are padding.
struct OrderBatch {
  std::uint64_t step = 0;
  std::uint64_t epoch = 0;
  std::uint64_t size = 0;
  std::uint64_t real = 0;
  /// The batch of a FixedOrder, whose rows are computed when they are needed.
  Batch fixed;
  /// The sample of every row of the global batch, with other orders.
  std::vector<SampleRef> rows;
  /// The contents of each row of a PackedOrder; Packed::position is an index of `rows`.
  std::vector<std::vector<Packed>> packed;
  /// The number of tokens per row of a PackedOrder.
  std::uint64_t capacity = 0;
};

class Order {
 public:
  virtual ~Order();
  virtual OrderCursor start() const = 0;
  /// The batch at the cursor, which is advanced.
  virtual OrderBatch next(OrderCursor& cursor) const = 0;
  /// The samples in the rows first, first + 1, ... of a batch of this order, one for each element
  /// of `out`. Called by several threads at once.
  virtual void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const;
  /// Text with everything that the sequence depends on, for comparison across ranks and with a
  /// saved state.
  virtual std::string describe() const = 0;
  /// How many samples each dataset must have for this order's references to exist; empty: not known
  /// beforehand.
  virtual std::vector<std::uint64_t> samples_needed() const { return {}; }
  /// Throws ConfigurationError for a cursor that this order cannot have reached. The default
  /// compares how many numbers it has.
  virtual void check(const OrderCursor& cursor) const;
};

/// Batches of one dataset, of a fixed size or of a schedule over steps. Any step is computed by
/// itself.
class FixedOrder : public Order {
 public:
  FixedOrder(SampleOrderOptions options, BatchSchedule schedule);
  OrderCursor start() const override { return {}; }
  OrderBatch next(OrderCursor& cursor) const override;
  void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override { return {order_.options().samples}; }
  const SampleOrder& samples() const { return order_; }

 private:
  SampleOrder order_;
};

/// Draws with replacement by weight: the first `samples_per_epoch` draws are epoch 0, and so on.
/// Any step is computed by itself.
class WeightedOrder : public Order {
 public:
  WeightedOrder(std::vector<double> weights, std::uint64_t seed, BatchSchedule schedule,
                std::uint64_t samples_per_epoch);
  OrderCursor start() const override { return {}; }
  OrderBatch next(OrderCursor& cursor) const override;
  void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const override;
  std::string describe() const override { return description_; }
  std::vector<std::uint64_t> samples_needed() const override { return {draws_.size()}; }

 private:
  WeightedDraws draws_;
  SampleOrder order_;
  std::string description_;
};

/// A mixture of datasets in batches of a schedule. It has no epochs (the epoch is always 0), so
/// that a loop over Loader::epoch() does not end: count the steps.
class MixtureOrder : public Order {
 public:
  MixtureOrder(Mixture mixture, BatchSchedule schedule);
  OrderCursor start() const override;
  OrderBatch next(OrderCursor& cursor) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override;
  void check(const OrderCursor& cursor) const override;

 private:
  Mixture mixture_;
  BatchSchedule schedule_;
};

/// Base of the orders below: one dataset whose samples have known lengths, in a new order each
/// epoch. The cursor is {epoch, samples taken of it}.
class LengthOrder : public Order {
 public:
  OrderCursor start() const override { return {0, {0, 0}, {}}; }
  std::vector<std::uint64_t> samples_needed() const override { return {lengths_.size()}; }
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
