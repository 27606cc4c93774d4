#pragma once
// StreamLoader: batches from iterable datasets, one stream per rank, whose lengths may differ, or
// from shards that the ranks divide. The ranks agree before every step, so that none waits for
// another whose stream has ended.
//
//   StreamLoader loader(socket, 32, manager.world(), {.uneven = UnevenData::pad, .workers = 2,
//     .transform = decode});
//   while (auto batch = loader.next()) { ... batch->tensors[0] ... }

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/group.h"
#include "tessera/data/dataset.h"
#include "tessera/data/fields.h"
#include "tessera/data/sharded_stream.h"

namespace tessera {

/// What happens at a step for which some ranks have a full batch and others do not.
enum class UnevenData : unsigned char {
  /// UnevenDataError is thrown on every rank, naming the ranks whose streams have ended.
  error,
  /// The stream ends on all ranks; what some had read for that step is dropped.
  drop,
  /// Ranks that lack rows repeat their last ones, marked in the mask, until all streams have ended.
  pad,
  /// Ranks take part with the rows they have, also with none (real = 0, the weight of their mean),
  /// until all streams have ended.
  weight_zero,
};

/// Thrown on every rank of the group if streams end at different steps (UnevenData::error).
class UnevenDataError : public Error {
 public:
  using Error::Error;
};

/// A batch of this rank, with the names of StreamOptions; rows from `real` on are padding.
struct StreamBatch : TensorBatch {
  /// Sum of `real` over the group.
  std::int64_t global_real = 0;
};

struct StreamOptions {
  UnevenData uneven = UnevenData::error;
  /// A sample (as `transform` returns it) from which a rank whose stream is empty from the start
  /// knows the shapes, with pad and weight_zero; without one, an error is thrown on every rank.
  Sample example = {};
  /// Threads that read ahead; 0: next() reads in the caller's thread. The stream itself is read by
  /// one thread at a time, from the first next() on; `transform` and the stacking of batches run in
  /// parallel. The order of samples and batches is the same for any number.
  int workers = 0;
  /// Number of batches read ahead of the one that is waited for; no more are begun (back-pressure).
  int prefetch = 2;
  /// The time without a batch of this rank's worker after which next() throws StalledError on every
  /// rank; calling it again waits again. Must be less than the group's time limit, or the other
  /// ranks run into that. The destructor abandons a worker that still reads.
  std::chrono::milliseconds stall_limit{std::chrono::minutes(2)};
  /// Applied to each sample (decode, augment); called by workers at the same time.
  std::function<Sample(Sample)> transform = {};
  /// Names of a sample's tensors as `transform` returns it, nested by '/' (see Fields). The same on
  /// every rank; samples with another number of tensors fail on all of them.
  std::vector<std::string> names = {};
};

class StreamLoader : Pinned {
 public:
  /// `rows`: size of this rank's batch, at least 1. `group`: the ranks that step together. Throws
  /// InvalidArgument for options out of range.
  StreamLoader(std::shared_ptr<IterableDataset> dataset, std::int64_t rows, Group group,
               StreamOptions options = {});
  /// Shards that the ranks of `group` divide: each reads some of the lanes, and so `rows` (of the
  /// global batch) in proportion. Ranks that share samples are each in a group of their own, at the
  /// same place: mesh.group("data"), on every coordinate of the other axes. Throws InvalidArgument
  /// for fewer lanes than ranks, and as ShardedStream.
  StreamLoader(std::shared_ptr<const StreamShards> shards, const ShardedStreamOptions& sharding,
               std::int64_t rows, Group group, StreamOptions options = {});
  ~StreamLoader();

  /// The next batch, or nullopt once the ranks have agreed that the data has ended. Collective: one
  /// small all-gather. Throws on every rank SampleError (a stream or transform failed, with the
  /// sample's position on the rank where it did; that step's samples are lost, but those of shards,
  /// which the next call reads again), StalledError, UnevenDataError. Ranks that were given other
  /// shards or options throw MismatchError at the first call.
  std::optional<StreamBatch> next();

  /// Number of steps and samples so far, as text: those that next() delivered, whatever has been
  /// read ahead. Of shards: the place of every lane, the same on all ranks.
  std::string state() const;
  /// Restores a state by reading again: a stream without positions cannot be resumed otherwise.
  /// With `replay` false it throws NotAvailable. With true it reads and discards as many samples as
  /// the state says, with a warning that names their number; that is correct only for a stream that
  /// starts again from the beginning and repeats itself. What was read ahead is dropped. Shards are
  /// opened where each lane was, whatever `replay` is and on any number of ranks. Throws
  /// ConfigurationError for a text of another loader, or a damaged one.
  void restore(const std::string& state, bool replay = false);
  /// It reads shards: state() serves any number of ranks.
  bool sharded() const;

 private:
  struct Engine;
  void begin(StreamOptions options);
  void stay(std::uint64_t taken);
  void follow(std::vector<ShardedStream::Place> mine, bool moved);
  void restore_places(const std::string& state);

  std::int64_t rows_;
  Group group_;
  UnevenData uneven_;
  Sample last_;
  std::uint64_t step_ = 0, taken_ = 0;
  bool ended_ = false, compared_ = false;
  std::vector<ShardedStream::Place> places_;  // of all lanes, at the next step
  std::shared_ptr<Engine> engine_;
};

}  // namespace tessera
