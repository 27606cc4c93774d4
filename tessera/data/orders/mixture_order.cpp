#include "tessera/data/orders.h"

#include <cmath>

#include "tessera/data/orders/detail/describe.h"

namespace tessera {

MixtureOrder::MixtureOrder(Mixture mixture, BatchSchedule schedule)
    : mixture_(std::move(mixture)), schedule_(std::move(schedule)) {}

OrderCursor MixtureOrder::start() const {
  const auto cursor = mixture_.start();
  OrderCursor start{0, {cursor.drawn}, cursor.credit};
  start.position.insert(start.position.end(), cursor.taken.begin(), cursor.taken.end());
  return start;
}

OrderBatch MixtureOrder::next(OrderCursor& cursor) const {
  check(cursor);
  Mixture::Cursor inner{
      cursor.position[0], {cursor.position.begin() + 1, cursor.position.end()}, cursor.credit};
  OrderBatch batch;
  batch.step = cursor.step;
  batch.size = batch.real = schedule_.size(cursor.step);
  std::vector<Mixture::Draw> draws(batch.size);
  mixture_.next(inner, draws);
  batch.rows.reserve(draws.size());
  for (const Mixture::Draw& draw : draws) batch.rows.push_back({draw.dataset, draw.sample});
  ++cursor.step;
  cursor.position.assign(1, inner.drawn);
  cursor.position.insert(cursor.position.end(), inner.taken.begin(), inner.taken.end());
  cursor.credit = inner.credit;
  return batch;
}

std::string MixtureOrder::describe() const {
  return concat("mixture: ", mixture_.describe(), ", ", detail::describe_schedule(schedule_));
}

std::vector<std::uint64_t> MixtureOrder::samples_needed() const {
  std::vector<std::uint64_t> samples;
  for (const auto& d : mixture_.datasets()) samples.push_back(d.samples);
  return samples;
}

void MixtureOrder::check(const OrderCursor& cursor) const {
  Order::check(cursor);
  std::uint64_t taken = 0;
  for (std::size_t d = 1; d < cursor.position.size(); ++d) taken += cursor.position[d];
  if (taken != cursor.position[0])
    detail::refuse_cursor(
        concat(taken, " samples taken of the datasets, ", cursor.position[0], " drawn in all"));
  for (const double credit : cursor.credit)
    if (!std::isfinite(credit)) detail::refuse_cursor(concat("a credit of ", credit));
}

}  // namespace tessera
