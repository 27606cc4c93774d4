#include "tessera/data/orders.h"

#include <algorithm>

#include "tessera/data/orders/detail/describe.h"

namespace tessera {

LengthOrder::LengthOrder(std::vector<std::uint64_t> lengths, std::uint64_t seed, bool shuffle)
    : lengths_(std::move(lengths)), seed_(seed), shuffle_(shuffle) {
  if (lengths_.empty())
    throw InvalidArgument("an order by length needs the length of at least one sample");
}

OrderCursor LengthOrder::start() const { return {0, {0, 0}, {}}; }

std::vector<std::uint64_t> LengthOrder::samples_needed() const { return {lengths_.size()}; }

void LengthOrder::check(const OrderCursor& cursor) const {
  Order::check(cursor);
  if (cursor.position[1] >= samples())
    detail::refuse_cursor(
        concat("offset ", cursor.position[1], " in an epoch of ", samples(), " samples"));
}

std::uint64_t LengthOrder::longest() const { return *std::ranges::max_element(lengths_); }

LengthOrder::Epoch::Epoch(const LengthOrder& order, std::uint64_t epoch)
    : order_(order), permutation_(order.samples(), order.seed_, epoch) {}

std::uint64_t LengthOrder::Epoch::sample(std::uint64_t position) const {
  return order_.shuffle_ ? permutation_(position) : position;
}

OrderBatch LengthOrder::begin_batch(const OrderCursor& cursor) const {
  OrderBatch batch;
  batch.step = cursor.step;
  batch.epoch = cursor.position[0];
  return batch;
}

void LengthOrder::end_batch(OrderCursor& cursor, std::uint64_t taken) const {
  ++cursor.step;
  cursor.position[1] += taken;
  if (cursor.position[1] == samples()) {
    ++cursor.position[0];
    cursor.position[1] = 0;
  }
}

std::string LengthOrder::describe_lengths() const {
  return concat(lengths_.size(), " lengths ", detail::fingerprint_of(lengths_));
}

std::string LengthOrder::describe_seed() const {
  return concat(", seed ", seed_, shuffle_ ? ", shuffled" : ", in order");
}

TokenBudgetOrder::TokenBudgetOrder(std::vector<std::uint64_t> lengths, TokenBudget budget,
                                   std::uint64_t seed, bool shuffle)
    : LengthOrder(std::move(lengths), seed, shuffle), budget_(budget) {
  // A sample that can never be loaded is reported now, not in the middle of an epoch.
  token_budget_batch(budget_, 0, 1, [&](std::uint64_t) { return longest(); });
}

OrderBatch TokenBudgetOrder::next(OrderCursor& cursor) const {
  check(cursor);
  const std::uint64_t offset = cursor.position[1];
  const Epoch epoch(*this, cursor.position[0]);
  OrderBatch batch = begin_batch(cursor);
  batch.size = batch.real = token_budget_batch(
      budget_, offset, samples(), [&](std::uint64_t position) { return epoch.length(position); });
  batch.rows.reserve(batch.size);
  for (std::uint64_t i = 0; i < batch.size; ++i)
    batch.rows.push_back({0, epoch.sample(offset + i)});
  end_batch(cursor, batch.size);
  return batch;
}

std::string TokenBudgetOrder::describe() const {
  return concat("token budget: ", describe_lengths(), ", ", budget_.tokens,
                budget_.padded ? " padded" : "", " tokens, at most ", budget_.max_samples,
                describe_seed());
}

PackedOrder::PackedOrder(std::vector<std::uint64_t> lengths, std::uint64_t rows,
                         std::uint64_t capacity, std::uint64_t seed, bool shuffle)
    : LengthOrder(std::move(lengths), seed, shuffle), rows_(rows), capacity_(capacity) {
  pack_batch(rows_, capacity_, 0, 1, [&](std::uint64_t) { return longest(); });
}

OrderBatch PackedOrder::next(OrderCursor& cursor) const {
  check(cursor);
  const std::uint64_t offset = cursor.position[1];
  const Epoch epoch(*this, cursor.position[0]);
  OrderBatch batch = begin_batch(cursor);
  batch.size = batch.real = rows_;
  batch.capacity = capacity_;
  batch.packed = pack_batch(rows_, capacity_, offset, samples(),
                            [&](std::uint64_t position) { return epoch.length(position); });
  std::uint64_t taken = 0;
  for (auto& row : batch.packed)
    for (Packed& packed : row) {
      const auto index = packed.position - offset;
      if (batch.rows.size() <= index) batch.rows.resize(index + 1);
      batch.rows[index] = {0, epoch.sample(packed.position)};
      packed.position = index;
      ++taken;
    }
  end_batch(cursor, taken);
  return batch;
}

std::string PackedOrder::describe() const {
  return concat("packed: ", describe_lengths(), ", ", rows_, " rows of ", capacity_,
                describe_seed());
}

}  // namespace tessera
