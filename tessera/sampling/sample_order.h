#pragma once
// SampleOrder: the global order of samples: which samples make up step s, whatever the number of
// ranks, hosts, workers or devices.
//
//   SampleOrder order({.samples = 10, .seed = 1, .last = LastBatch::keep}, BatchSchedule({{0,
//     4}}));
//   order.step(2)   -> epoch 0, offset 8, 2 samples        // 10 = 4 + 4 + 2
//   order.step(3)   -> epoch 1, offset 0, 4 samples, in another order
//   order.sample(order.step(3), 0)  -> an index below 10

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/sampling/permutation.h"

namespace tessera {

/// Global batch size as a function of the step: `size` samples from step `from` on, until the next
/// entry.
class BatchSchedule {
 public:
  struct Entry {
    std::uint64_t from;
    std::uint64_t size;
    bool operator==(const Entry&) const = default;
  };
  /// Entries ascend in `from`, the first at 0, with sizes of at least 1. Throws InvalidArgument
  /// otherwise.
  explicit BatchSchedule(std::vector<Entry> entries);
  explicit BatchSchedule(std::uint64_t size) : BatchSchedule({{0, size}}) {}
  std::uint64_t size(std::uint64_t step) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// What happens to the samples at the end of an epoch that do not fill a batch.
enum class LastBatch : unsigned char {
  /// They form a smaller batch; weight it by its true size.
  keep,
  /// They form a full batch whose tail repeats samples from the start of the epoch's order, marked
  /// as padding.
  pad,
  /// They are left out in this epoch (other samples in the next, since the order changes).
  drop,
};

struct SampleOrderOptions {
  /// Number of samples of one epoch, at most 2^63.
  std::uint64_t samples = 0;
  std::uint64_t seed = 0;
  /// false: the order is 0, 1, 2, ... in each epoch.
  bool shuffle = true;
  LastBatch last = LastBatch::keep;
};

/// One step of the global sequence.
struct Batch {
  std::uint64_t epoch = 0;
  /// Position of the first sample in the epoch's order.
  std::uint64_t offset = 0;
  /// Number of positions, padding included.
  std::uint64_t size = 0;
  /// Number of positions without padding: positions real, ..., size - 1 of the batch are padding.
  std::uint64_t real = 0;
  bool operator==(const Batch&) const = default;
};

class SampleOrder {
 public:
  /// Throws InvalidArgument without samples, and for LastBatch::drop with a batch size above the
  /// number of samples (no batch would ever be full).
  SampleOrder(SampleOrderOptions options, BatchSchedule schedule);

  /// Step s, computed by itself in O(entries of the schedule): this is the cost of resuming.
  Batch step(std::uint64_t s) const;
  /// The step that follows `batch`, whose number is s.
  Batch after(const Batch& batch, std::uint64_t s) const;
  /// Number of steps that begin in epochs before `epoch`.
  std::uint64_t first_step(std::uint64_t epoch) const;

  /// Index of the i-th sample of a batch, i < batch.size.
  std::uint64_t sample(const Batch& batch, std::uint64_t i) const;
  /// The samples first, first + 1, ... of a batch, one for each element of `out`: a few nanoseconds
  /// each, whereas sample() makes the permutation anew. Throws InvalidArgument beyond the batch.
  void samples(const Batch& batch, std::uint64_t first, std::span<std::uint64_t> out) const;
  /// The order of one epoch.
  KeyedPermutation permutation(std::uint64_t epoch) const {
    return {options_.samples, options_.seed, epoch};
  }

  const SampleOrderOptions& options() const { return options_; }
  const BatchSchedule& schedule() const { return schedule_; }

 private:
  struct Cursor {
    std::uint64_t step, epoch, offset;
  };
  Batch batch_at(std::uint64_t epoch, std::uint64_t offset, std::uint64_t size) const;
  std::uint64_t steps_left(std::uint64_t offset, std::uint64_t size) const;
  // Advances by whole runs of steps of one size, until either limit is reached.
  void walk(Cursor& at, std::uint64_t until_step, std::uint64_t until_epoch) const;

  SampleOrderOptions options_;
  BatchSchedule schedule_;
};

}  // namespace tessera
