#include "tessera/data/order.h"

#include <algorithm>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::string describe_schedule(const BatchSchedule& schedule) {
  std::string text = "batches";
  for (const auto& entry : schedule.entries()) text += concat(" ", entry.from, ":", entry.size);
  return text;
}

template <class Numbers>
std::uint64_t fingerprint(const Numbers& numbers) {
  Hash hash;
  for (const auto& n : numbers) hash.bytes(&n, sizeof n);
  return hash.value();
}

// The order of one epoch as positions -> samples.
std::uint64_t sample_at(std::uint64_t position, std::uint64_t size, std::uint64_t seed, std::uint64_t epoch, bool shuffle) {
  return shuffle ? KeyedPermutation(size, seed, epoch)(position) : position;
}

void check_lengths(const std::vector<std::uint64_t>& lengths) {
  if (lengths.empty()) throw InvalidArgument("an order by length needs the length of at least one sample");
}

// Cursors of orders by length: {epoch, offset}.
void check_cursor(const OrderCursor& cursor, std::size_t numbers) {
  if (cursor.position.size() != numbers)
    throw InvalidArgument(
        concat("a cursor with ", cursor.position.size(), " positions, this order saves ", numbers, "; it belongs to another order"));
}

void end_of_batch(OrderCursor& cursor, std::uint64_t taken, std::uint64_t size) {
  ++cursor.step;
  cursor.position[1] += taken;
  if (cursor.position[1] == size) {
    ++cursor.position[0];
    cursor.position[1] = 0;
  }
}

}  // namespace

Order::~Order() = default;

FixedOrder::FixedOrder(SampleOrderOptions options, BatchSchedule schedule) : order_(options, std::move(schedule)) {}

OrderCursor FixedOrder::start() const { return {}; }

OrderBatch FixedOrder::next(OrderCursor& cursor) const {
  const Batch batch = order_.step(cursor.step);
  return {cursor.step++, batch.epoch, batch.size, batch.real, batch, {}, {}};
}

SampleRef FixedOrder::row(const OrderBatch& batch, std::uint64_t i) const { return {0, order_.sample(batch.fixed, i)}; }

std::string FixedOrder::describe() const {
  const auto& o = order_.options();
  return concat("fixed: ", o.samples, " samples, seed ", o.seed, o.shuffle ? ", shuffled" : ", in order", ", last batch ", static_cast<int>(o.last),
                ", ", describe_schedule(order_.schedule()));
}

WeightedOrder::WeightedOrder(std::vector<double> weights, std::uint64_t seed, BatchSchedule schedule, std::uint64_t samples_per_epoch)
    : draws_(weights, seed),
      order_({.samples = samples_per_epoch, .seed = seed, .shuffle = false}, std::move(schedule)),
      description_(concat("weighted: ", weights.size(), " weights ", fingerprint(weights), ", seed ", seed, ", ", samples_per_epoch, " an epoch, ",
                          describe_schedule(order_.schedule()))) {}

OrderCursor WeightedOrder::start() const { return {}; }

OrderBatch WeightedOrder::next(OrderCursor& cursor) const {
  const Batch batch = order_.step(cursor.step);
  return {cursor.step++, batch.epoch, batch.size, batch.real, batch, {}, {}};
}

SampleRef WeightedOrder::row(const OrderBatch& batch, std::uint64_t i) const {
  return {0, draws_(batch.epoch * order_.options().samples + batch.fixed.offset + i)};
}

std::string WeightedOrder::describe() const { return description_; }

MixtureOrder::MixtureOrder(Mixture mixture, BatchSchedule schedule, std::string description)
    : mixture_(std::move(mixture)), schedule_(std::move(schedule)), description_(std::move(description)) {}

OrderCursor MixtureOrder::start() const {
  const auto cursor = mixture_.start();
  OrderCursor start{0, {cursor.drawn}, cursor.credit};
  start.position.insert(start.position.end(), cursor.taken.begin(), cursor.taken.end());
  return start;
}

OrderBatch MixtureOrder::next(OrderCursor& cursor) const {
  check_cursor(cursor, mixture_.datasets().size() + 1);
  Mixture::Cursor inner{cursor.position[0], {cursor.position.begin() + 1, cursor.position.end()}, cursor.credit};
  OrderBatch batch{.step = cursor.step,
                   .epoch = 0,
                   .size = schedule_.size(cursor.step),
                   .real = schedule_.size(cursor.step),
                   .fixed = {},
                   .rows = {},
                   .packed = {}};
  for (std::uint64_t i = 0; i < batch.size; ++i) {
    const auto draw = mixture_.next(inner);
    batch.rows.push_back({draw.dataset, draw.sample});
  }
  ++cursor.step;
  cursor.position.assign(1, inner.drawn);
  cursor.position.insert(cursor.position.end(), inner.taken.begin(), inner.taken.end());
  cursor.credit = inner.credit;
  return batch;
}

std::string MixtureOrder::describe() const {
  std::string text = concat("mixture: ", description_, ", ", describe_schedule(schedule_));
  for (const auto& d : mixture_.datasets()) text += concat(", ", d.name, ":", d.samples);
  return text;
}

TokenBudgetOrder::TokenBudgetOrder(std::vector<std::uint64_t> lengths, TokenBudget budget, std::uint64_t seed, bool shuffle)
    : lengths_(std::move(lengths)), budget_(budget), seed_(seed), shuffle_(shuffle) {
  check_lengths(lengths_);
  // A sample that can never be loaded is reported now, not in the middle of an epoch.
  const auto longest = std::max_element(lengths_.begin(), lengths_.end()) - lengths_.begin();
  token_budget_batch(budget_, 0, 1, [&](std::uint64_t) { return lengths_[static_cast<std::size_t>(longest)]; });
}

OrderCursor TokenBudgetOrder::start() const { return {0, {0, 0}, {}}; }

OrderBatch TokenBudgetOrder::next(OrderCursor& cursor) const {
  check_cursor(cursor, 2);
  const auto epoch = cursor.position[0], offset = cursor.position[1], size = static_cast<std::uint64_t>(lengths_.size());
  auto sample = [&](std::uint64_t position) { return sample_at(position, size, seed_, epoch, shuffle_); };
  const auto count = token_budget_batch(budget_, offset, size, [&](std::uint64_t position) { return lengths_[sample(position)]; });
  OrderBatch batch{.step = cursor.step, .epoch = epoch, .size = count, .real = count, .fixed = {}, .rows = {}, .packed = {}};
  for (std::uint64_t i = 0; i < count; ++i) batch.rows.push_back({0, sample(offset + i)});
  end_of_batch(cursor, count, size);
  return batch;
}

std::string TokenBudgetOrder::describe() const {
  return concat("token budget: ", lengths_.size(), " lengths ", fingerprint(lengths_), ", ", budget_.tokens, budget_.padded ? " padded" : "",
                " tokens, at most ", budget_.max_samples, ", seed ", seed_, shuffle_ ? ", shuffled" : ", in order");
}

PackedOrder::PackedOrder(std::vector<std::uint64_t> lengths, std::uint64_t rows, std::uint64_t capacity, std::uint64_t seed, bool shuffle)
    : lengths_(std::move(lengths)), rows_(rows), capacity_(capacity), seed_(seed), shuffle_(shuffle) {
  check_lengths(lengths_);
  const auto longest = std::max_element(lengths_.begin(), lengths_.end()) - lengths_.begin();
  pack_batch(rows_, capacity_, 0, 1, [&](std::uint64_t) { return lengths_[static_cast<std::size_t>(longest)]; });
}

OrderCursor PackedOrder::start() const { return {0, {0, 0}, {}}; }

OrderBatch PackedOrder::next(OrderCursor& cursor) const {
  check_cursor(cursor, 2);
  const auto epoch = cursor.position[0], offset = cursor.position[1], size = static_cast<std::uint64_t>(lengths_.size());
  auto sample = [&](std::uint64_t position) { return sample_at(position, size, seed_, epoch, shuffle_); };
  OrderBatch batch{.step = cursor.step, .epoch = epoch, .size = rows_, .real = rows_, .fixed = {}, .rows = {}, .packed = {}};
  batch.packed = pack_batch(rows_, capacity_, offset, size, [&](std::uint64_t position) { return lengths_[sample(position)]; });
  std::uint64_t taken = 0;
  for (auto& row : batch.packed)
    for (Packed& packed : row) {
      const auto index = packed.position - offset;
      if (batch.rows.size() <= index) batch.rows.resize(index + 1);
      batch.rows[index] = {0, sample(packed.position)};
      packed.position = index;
      ++taken;
    }
  end_of_batch(cursor, taken, size);
  return batch;
}

std::string PackedOrder::describe() const {
  return concat("packed: ", lengths_.size(), " lengths ", fingerprint(lengths_), ", ", rows_, " rows of ", capacity_, ", seed ", seed_,
                shuffle_ ? ", shuffled" : ", in order");
}

}  // namespace tessera
