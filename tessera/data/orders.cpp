#include "tessera/data/orders.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/sampling/sample_order.h"

namespace tessera {
namespace {

std::string describe_schedule(const BatchSchedule& schedule) {
  std::string text = "batches";
  for (const auto& entry : schedule.entries()) text += concat(" ", entry.from, ":", entry.size);
  return text;
}

template <class Numbers>
std::uint64_t fingerprint_of(const Numbers& numbers) {
  Hash hash;
  for (const auto& n : numbers) hash.bytes(&n, sizeof n);
  return hash.value();
}

[[noreturn]] void refuse_cursor(const std::string& why) {
  throw ConfigurationError("a position of another order, or a damaged one: ", why,
                           "; restore a state that this order saved");
}

}  // namespace

Order::~Order() = default;

void Order::rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const {
  if (first > batch.rows.size() || out.size() > batch.rows.size() - first)
    throw InvalidArgument(out.size(), " rows from ", first, " on of a batch that lists ",
                          batch.rows.size());
  std::copy_n(batch.rows.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

void Order::check(const OrderCursor& cursor) const {
  const OrderCursor wanted = start();
  if (cursor.position.size() != wanted.position.size() ||
      cursor.credit.size() != wanted.credit.size())
    refuse_cursor(concat(cursor.position.size(), " positions and ", cursor.credit.size(),
                         " credits, where this order saves ", wanted.position.size(), " and ",
                         wanted.credit.size()));
}

FixedOrder::FixedOrder(SampleOrderOptions options, BatchSchedule schedule)
    : order_(options, std::move(schedule)) {}

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

std::string FixedOrder::describe() const {
  const auto& o = order_.options();
  return concat("fixed: ", o.samples, " samples, seed ", o.seed,
                o.shuffle ? ", shuffled" : ", in order", ", last batch ", static_cast<int>(o.last),
                ", ", describe_schedule(order_.schedule()));
}

WeightedOrder::WeightedOrder(std::vector<double> weights, std::uint64_t seed,
                             BatchSchedule schedule, std::uint64_t samples_per_epoch)
    : draws_(weights, seed),
      order_({.samples = samples_per_epoch, .seed = seed, .shuffle = false}, std::move(schedule)),
      description_(concat("weighted: ", weights.size(), " weights ", fingerprint_of(weights),
                          ", seed ", seed, ", ", samples_per_epoch, " an epoch, ",
                          describe_schedule(order_.schedule()))) {}

OrderBatch WeightedOrder::next(OrderCursor& cursor) const {
  const Batch batch = order_.step(cursor.step);
  return {cursor.step++, batch.epoch, batch.size, batch.real, batch, {}, {}, 0};
}

void WeightedOrder::rows(const OrderBatch& batch, std::uint64_t first,
                         std::span<SampleRef> out) const {
  std::uint64_t draw = batch.epoch * order_.options().samples + batch.fixed.offset + first;
  for (SampleRef& ref : out) ref = {0, draws_(draw++)};
}

LengthOrder::LengthOrder(std::vector<std::uint64_t> lengths, std::uint64_t seed, bool shuffle)
    : lengths_(std::move(lengths)), seed_(seed), shuffle_(shuffle) {
  if (lengths_.empty())
    throw InvalidArgument("an order by length needs the length of at least one sample");
}

void LengthOrder::check(const OrderCursor& cursor) const {
  Order::check(cursor);
  if (cursor.position[1] >= samples())
    refuse_cursor(concat("offset ", cursor.position[1], " in an epoch of ", samples(), " samples"));
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
  return concat(lengths_.size(), " lengths ", fingerprint_of(lengths_));
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
  return concat("mixture: ", mixture_.describe(), ", ", describe_schedule(schedule_));
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
    refuse_cursor(
        concat(taken, " samples taken of the datasets, ", cursor.position[0], " drawn in all"));
  for (const double credit : cursor.credit)
    if (!std::isfinite(credit)) refuse_cursor(concat("a credit of ", credit));
}

}  // namespace tessera
