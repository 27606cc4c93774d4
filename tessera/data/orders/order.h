#pragma once
// Orders: the sequence of global batches that every rank computes alike, and the few numbers from
// which it continues. Derive from Order for one of your own.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/sampling/packing.h"
#include "tessera/sampling/sample_order.h"

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

}  // namespace tessera
