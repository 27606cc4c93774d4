#pragma once
// The order of a mixture of datasets.

#include "tessera/data/orders/order.h"
#include "tessera/sampling/sampling.h"

namespace tessera {

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

}  // namespace tessera
