#include "tessera/data/orders.h"

#include "tessera/data/orders/detail/describe.h"

namespace tessera {

FixedOrder::FixedOrder(SampleOrderOptions options, BatchSchedule schedule)
    : order_(options, std::move(schedule)) {}

OrderCursor FixedOrder::start() const { return {}; }

OrderBatch FixedOrder::next(OrderCursor& cursor) const {
  const Batch batch = order_.step(cursor.step);
  return {cursor.step++, batch.epoch, batch.size, batch.real, batch, {}, {}, 0};
}

void FixedOrder::rows(const OrderBatch& batch, std::uint64_t first,
                      std::span<SampleRef> out) const {
  std::vector<std::uint64_t> samples(out.size());
  order_.samples(batch.fixed, first, samples);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = {0, samples[i]};
}

std::vector<std::uint64_t> FixedOrder::samples_needed() const { return {order_.options().samples}; }

std::string FixedOrder::describe() const {
  const auto& o = order_.options();
  return concat("fixed: ", o.samples, " samples, seed ", o.seed,
                o.shuffle ? ", shuffled" : ", in order", ", last batch ", static_cast<int>(o.last),
                ", ", detail::describe_schedule(order_.schedule()));
}

WeightedOrder::WeightedOrder(std::vector<double> weights, std::uint64_t seed,
                             BatchSchedule schedule, std::uint64_t samples_per_epoch)
    : draws_(weights, seed),
      order_({.samples = samples_per_epoch, .seed = seed, .shuffle = false}, std::move(schedule)),
      description_(concat("weighted: ", weights.size(), " weights ",
                          detail::fingerprint_of(weights), ", seed ", seed, ", ", samples_per_epoch,
                          " an epoch, ", detail::describe_schedule(order_.schedule()))) {}

OrderCursor WeightedOrder::start() const { return {}; }

OrderBatch WeightedOrder::next(OrderCursor& cursor) const {
  const Batch batch = order_.step(cursor.step);
  return {cursor.step++, batch.epoch, batch.size, batch.real, batch, {}, {}, 0};
}

void WeightedOrder::rows(const OrderBatch& batch, std::uint64_t first,
                         std::span<SampleRef> out) const {
  std::uint64_t draw = batch.epoch * order_.options().samples + batch.fixed.offset + first;
  for (SampleRef& ref : out) ref = {0, draws_(draw++)};
}

std::vector<std::uint64_t> WeightedOrder::samples_needed() const { return {draws_.size()}; }

std::string WeightedOrder::describe() const { return description_; }

}  // namespace tessera
