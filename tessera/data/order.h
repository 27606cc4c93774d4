#pragma once
// Orders: the sequence of global batches that every rank computes alike, and the few numbers from
// which it goes on.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/sampling/packing.h"
#include "tessera/sampling/sample_order.h"
#include "tessera/sampling/sampling.h"

namespace tessera {

/// Where an order stands: small numbers whose meaning belongs to the order. Saved as text by
/// Loader::state().
struct OrderCursor {
  std::uint64_t step = 0;
  /// Empty for orders whose step number says everything.
  std::vector<std::uint64_t> position;
  /// Of mixtures.
  std::vector<double> credit;
  bool operator==(const OrderCursor&) const = default;
};

/// A global batch: `size` rows, of which those from `real` on are padding.
struct OrderBatch {
  std::uint64_t step = 0;
  std::uint64_t epoch = 0;
  std::uint64_t size = 0;
  std::uint64_t real = 0;
  /// Of a FixedOrder: its rows are computed where they are needed.
  Batch fixed;
  /// Of other orders: every row of the global batch.
  std::vector<SampleRef> rows;
  /// Of a PackedOrder: the rows' contents, Packed::position an index of `rows`.
  std::vector<std::vector<Packed>> packed;
  /// Of a PackedOrder: tokens of a row.
  std::uint64_t capacity = 0;
};

class Order {
 public:
  virtual ~Order();
  virtual OrderCursor start() const = 0;
  /// The batch at the cursor; moves the cursor behind it.
  virtual OrderBatch next(OrderCursor& cursor) const = 0;
  /// The samples in the rows first, first + 1, ... of a batch of this order, one for each place of
  /// `out`. Called by several threads at once.
  virtual void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const;
  /// Describes everything that the sequence depends on, for comparison across ranks and with a
  /// saved state.
  virtual std::string describe() const = 0;
  /// How many samples each dataset must have for this order's references to exist; empty: not known
  /// beforehand.
  virtual std::vector<std::uint64_t> samples_needed() const { return {}; }
  /// Throws ConfigurationError for a cursor that this order cannot have reached. The default
  /// compares the numbers of numbers.
  virtual void check(const OrderCursor& cursor) const;
};

/// Batches of a fixed size, or of a schedule over steps, of one dataset: any step is computed
/// alone.
class FixedOrder : public Order {
 public:
  FixedOrder(SampleOrderOptions options, BatchSchedule schedule);
  OrderCursor start() const override;
  OrderBatch next(OrderCursor& cursor) const override;
  void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override;
  const SampleOrder& samples() const { return order_; }

 private:
  SampleOrder order_;
};

/// Draws with replacement by weight: the first `samples_per_epoch` draws are epoch 0, and so on.
/// Any step is computed alone.
class WeightedOrder : public Order {
 public:
  WeightedOrder(std::vector<double> weights, std::uint64_t seed, BatchSchedule schedule,
                std::uint64_t samples_per_epoch);
  OrderCursor start() const override;
  OrderBatch next(OrderCursor& cursor) const override;
  void rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override;

 private:
  WeightedDraws draws_;
  SampleOrder order_;
  std::string description_;
};

/// A mixture of datasets in batches of a schedule. It has no epochs (always 0), so that a loop over
/// Loader::epoch() does not end: count the steps.
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

/// As many samples as a token budget takes. `lengths[i]`: tokens of sample i, known on every rank.
class TokenBudgetOrder : public Order {
 public:
  TokenBudgetOrder(std::vector<std::uint64_t> lengths, TokenBudget budget, std::uint64_t seed,
                   bool shuffle = true);
  OrderCursor start() const override;
  OrderBatch next(OrderCursor& cursor) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override;
  void check(const OrderCursor& cursor) const override;

 private:
  std::vector<std::uint64_t> lengths_;
  TokenBudget budget_;
  std::uint64_t seed_;
  bool shuffle_;
};

/// Batches of `rows` rows of `capacity` tokens, packed with whole samples.
class PackedOrder : public Order {
 public:
  PackedOrder(std::vector<std::uint64_t> lengths, std::uint64_t rows, std::uint64_t capacity,
              std::uint64_t seed, bool shuffle = true);
  OrderCursor start() const override;
  OrderBatch next(OrderCursor& cursor) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override;
  void check(const OrderCursor& cursor) const override;

 private:
  std::vector<std::uint64_t> lengths_;
  std::uint64_t rows_, capacity_, seed_;
  bool shuffle_;
};

}  // namespace tessera
