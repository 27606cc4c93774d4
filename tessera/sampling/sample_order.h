#pragma once
// The global order of samples: which samples make up step s, whatever the number of ranks, hosts,
// workers or devices.
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

/// Global batch size as a function of the step: from step `from` on, `size` samples, until the next
/// entry.
class BatchSchedule {
 public:
  struct Entry {
    std::uint64_t from;
    std::uint64_t size;
    bool operator==(const Entry&) const = default;
  };
  /// Ascending in `from`, the first 0, sizes at least 1; else InvalidArgument.
  explicit BatchSchedule(std::vector<Entry> entries);
  explicit BatchSchedule(std::uint64_t size) : BatchSchedule({{0, size}}) {}
  std::uint64_t size(std::uint64_t step) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// What becomes of the samples at the end of an epoch that do not fill a batch.
enum class LastBatch : unsigned char {
  /// A smaller batch; weights by its true size.
  keep,
  /// A full batch whose tail repeats samples from the start of the epoch's order, marked as
  /// padding.
  pad,
  /// Left out in this epoch (others in the next, since the order changes).
  drop,
};

struct SampleOrderOptions {
  /// Number of samples of one epoch, at most 2^63.
  std::uint64_t samples = 0;
  std::uint64_t seed = 0;
  /// false: 0, 1, 2, ... in each epoch.
  bool shuffle = true;
  LastBatch last = LastBatch::keep;
};

/// One step of the global sequence.
struct Batch {
  std::uint64_t epoch = 0;
  /// Position of the first sample in the epoch's order.
  std::uint64_t offset = 0;
  /// Positions, padding included.
  std::uint64_t size = 0;
  /// Without padding: positions real, ..., size - 1 of the batch are padding.
  std::uint64_t real = 0;
  bool operator==(const Batch&) const = default;
};

class SampleOrder {
 public:
  /// Throws InvalidArgument without samples, and for LastBatch::drop with a batch size above the
  /// number of samples (no batch would ever be full).
  SampleOrder(SampleOrderOptions options, BatchSchedule schedule);

  /// Step s, computed alone in O(entries of the schedule): this is what resuming costs.
  Batch step(std::uint64_t s) const;
  /// The step after the one that `batch` is, given its number s.
  Batch after(const Batch& batch, std::uint64_t s) const;
  /// Steps that begin in epochs before `epoch`.
  std::uint64_t first_step(std::uint64_t epoch) const;

  /// Index of the i-th sample of a batch, i < batch.size.
  std::uint64_t sample(const Batch& batch, std::uint64_t i) const;
  /// The samples first, first + 1, ... of a batch, one for each place of `out`: a few nanoseconds
  /// each, where sample() makes the permutation anew. Throws InvalidArgument beyond the batch.
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
  // Moves on by whole runs of steps of one size, until either limit is reached.
  void walk(Cursor& at, std::uint64_t until_step, std::uint64_t until_epoch) const;

  SampleOrderOptions options_;
  BatchSchedule schedule_;
};

}  // namespace tessera
