#pragma once
// Orders whose batch sizes are known beforehand: any step is computed by itself.

#include "tessera/data/orders/order.h"
#include "tessera/sampling/sampling.h"

namespace tessera {

/// Batches of one dataset, of a fixed size or of a schedule over steps. Any step is computed by
/// itself.
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
/// Any step is computed by itself.
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

}  // namespace tessera
