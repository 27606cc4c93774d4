#include "tessera/sampling/sample_order.h"

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr auto kForever = std::numeric_limits<std::uint64_t>::max();

}  // namespace

BatchSchedule::BatchSchedule(std::vector<Entry> entries) : entries_(std::move(entries)) {
  if (entries_.empty() || entries_.front().from != 0)
    throw InvalidArgument("a batch schedule needs a first entry, from step 0");
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].size == 0)
      throw InvalidArgument("the batch size from step ", entries_[i].from,
                            " is 0; give at least 1");
    if (i > 0 && entries_[i].from <= entries_[i - 1].from)
      throw InvalidArgument("batch schedule entries must ascend: step ", entries_[i].from,
                            " follows step ", entries_[i - 1].from);
  }
}

std::uint64_t BatchSchedule::size(std::uint64_t step) const {
  return std::prev(std::ranges::upper_bound(entries_, step, {}, &Entry::from))->size;
}

SampleOrder::SampleOrder(SampleOrderOptions options, BatchSchedule schedule)
    : options_(options), schedule_(std::move(schedule)) {
  if (options_.samples == 0 || options_.samples > 1ull << 63)
    throw InvalidArgument("an order of ", options_.samples, " samples; give 1 to 2^63");
  for (const auto& entry : schedule_.entries())
    if (options_.last == LastBatch::drop && entry.size > options_.samples)
      throw InvalidArgument(
          "a batch of ", entry.size, " from ", options_.samples,
          " samples with LastBatch::drop would never be full; use a smaller batch, keep or pad");
}

std::uint64_t SampleOrder::steps_left(std::uint64_t offset, std::uint64_t size) const {
  const std::uint64_t left = options_.samples - offset;
  return options_.last == LastBatch::drop ? left / size : left / size + (left % size != 0);
}

void SampleOrder::walk(Cursor& at, std::uint64_t until_step, std::uint64_t until_epoch) const {
  const auto& entries = schedule_.entries();
  for (std::size_t e = 0; e < entries.size(); ++e) {
    const std::uint64_t size = entries[e].size;
    const std::uint64_t end =
        std::min(until_step, e + 1 < entries.size() ? entries[e + 1].from : kForever);
    if (end <= at.step) continue;
    while (at.step < end && at.epoch < until_epoch) {
      const std::uint64_t left = steps_left(at.offset, size);
      if (left == 0) {
        ++at.epoch;
        at.offset = 0;
      } else if (at.offset == 0 && end - at.step > left) {
        // Complete epochs at once; the last one is walked, since what remains of it may suit the
        // next entry's size.
        const std::uint64_t epochs = std::min((end - at.step - 1) / left, until_epoch - at.epoch);
        at.step += epochs * left;
        at.epoch += epochs;
      } else {
        const std::uint64_t steps = std::min(left, end - at.step);
        at.step += steps;
        at.offset = steps == left && options_.last != LastBatch::drop ? options_.samples
                                                                      : at.offset + steps * size;
      }
    }
    if (at.epoch >= until_epoch) return;
  }
}

Batch SampleOrder::batch_at(std::uint64_t epoch, std::uint64_t offset, std::uint64_t size) const {
  // the rest of this epoch is dropped, or the batch before ended it
  if (steps_left(offset, size) == 0) {
    ++epoch;
    offset = 0;
  }
  const std::uint64_t real = std::min(size, options_.samples - offset);
  return {epoch, offset, options_.last == LastBatch::pad ? size : real, real};
}

Batch SampleOrder::step(std::uint64_t s) const {
  Cursor at{0, 0, 0};
  walk(at, s, kForever);
  return batch_at(at.epoch, at.offset, schedule_.size(s));
}

Batch SampleOrder::after(const Batch& batch, std::uint64_t s) const {
  std::uint64_t epoch = batch.epoch, offset = batch.offset + batch.real;
  if (offset >= options_.samples) {
    ++epoch;
    offset = 0;
  }
  return batch_at(epoch, offset, schedule_.size(s + 1));
}

std::uint64_t SampleOrder::first_step(std::uint64_t epoch) const {
  Cursor at{0, 0, 0};
  walk(at, kForever, epoch);
  return at.step;
}

std::uint64_t SampleOrder::sample(const Batch& batch, std::uint64_t i) const {
  // Padding repeats the epoch's order from its start.
  const std::uint64_t position =
      i < batch.real ? batch.offset + i : (i - batch.real) % options_.samples;
  return options_.shuffle ? permutation(batch.epoch)(position) : position;
}

void SampleOrder::samples(const Batch& batch, std::uint64_t first,
                          std::span<std::uint64_t> out) const {
  if (first > batch.size || out.size() > batch.size - first)
    throw InvalidArgument(out.size(), " samples from ", first, " on of a batch of ", batch.size);
  const KeyedPermutation order = permutation(batch.epoch);
  auto put = [&](std::uint64_t position, std::span<std::uint64_t> part) {
    if (options_.shuffle) return order.fill(position, part);
    for (std::uint64_t& index : part) index = position++;
  };
  const std::uint64_t real =
      first < batch.real ? std::min<std::uint64_t>(batch.real - first, out.size()) : 0;
  put(batch.offset + first, out.first(real));
  for (std::uint64_t i = real; i < out.size();) {  // padding: repeats the epoch's order
    const std::uint64_t position = (first + i - batch.real) % options_.samples;
    const std::uint64_t count =
        std::min<std::uint64_t>(out.size() - i, options_.samples - position);
    put(position, out.subspan(i, count));
    i += count;
  }
}

}  // namespace tessera
