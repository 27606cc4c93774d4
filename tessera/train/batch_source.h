#pragma once
// Where batches come from, and how ranks with different numbers of them go on together.
//
//   Trainer(options).fit(task, batches_of(loader));          // a Loader: the same steps everywhere
//   Trainer(options).fit(task, batches_of(stream));          // a StreamLoader
//   Trainer(options).fit(task, batches_of({batch, ...}));    // in memory, a list on each rank
//
// A source of one's own derives from BatchSource.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/loader.h"
#include "tessera/data/stream_loader.h"
#include "tessera/train/strategy.h"

namespace tessera {

class BatchSource {
 public:
  virtual ~BatchSource();
  /// The next batch of this rank, or nothing at the end of the epoch.
  virtual std::optional<MicroBatch> next() = 0;
  /// Begins an epoch: the first one too, but not one that restore() went into.
  virtual void start_epoch(std::uint64_t epoch) = 0;
  /// The place of next(); restore() goes on there, in the middle of an epoch too.
  virtual std::string state() const = 0;
  virtual void restore(const std::string& state) = 0;

  /// next() ends on all ranks at the same call, by itself: nothing needs to be agreed on.
  virtual bool ends_together() const { return false; }
  /// state() is the same text on every rank, and serves any number of ranks.
  virtual bool shared_state() const { return false; }
  /// How many batches next() will still give in this epoch; absent: not known. Where every rank
  /// knows, they agree once an epoch instead of once a batch.
  virtual std::optional<std::uint64_t> remaining() const { return std::nullopt; }
  /// True if next() would give nothing. May read ahead, without moving state(). False where that is
  /// not known.
  virtual bool ended() { return remaining() == std::uint64_t{0}; }
  /// restore() can go back to the beginning, so that every validation has the same batches.
  virtual bool rewinds() const { return true; }
  /// Called once before the first batch; throws on every rank if the ranks' sources do not fit
  /// together.
  virtual void check(Strategy&) {}
};

/// Batches of a Loader; an epoch is the loader's. Ranks whose loaders differ throw (over the
/// strategy's manager). `make`: what becomes of a loaded batch; absent: its tensors as they are.
std::shared_ptr<BatchSource> batches_of(Loader& loader,
                                        std::function<MicroBatch(LoadedBatch)> make = {});
/// Batches of a StreamLoader, in which the ranks agree already. There is one epoch: a stream has
/// one end (of shards, as many epochs as it says). `replay`: see StreamLoader::restore.
std::shared_ptr<BatchSource> batches_of(StreamLoader& loader, bool replay = false);
/// Batches in memory, the same in every epoch.
std::shared_ptr<BatchSource> batches_of(std::vector<MicroBatch> batches);
/// Batches that a function gives: (epoch, index in the epoch), nothing at the end of the epoch. To
/// be resumed exactly it depends on nothing else.
std::shared_ptr<BatchSource> batches_of(
    std::function<std::optional<MicroBatch>(std::uint64_t epoch, std::uint64_t index)> make);
/// A batch of tensors whose rows all count.
MicroBatch make_batch(std::vector<at::Tensor> tensors);

/// The batches of one rank, in step with the others': next() gives a batch on all ranks or on none,
/// agreed before anything is computed.
class AgreedBatches {
 public:
  /// Where some ranks have a batch and others do not: `error` throws UnevenDataError on every rank;
  /// `drop` ends the epoch for all; `pad` gives those that lack one their last batch again, masked
  /// out and with weight zero; `weight_zero` gives them one without rows. (A rank that has had none
  /// at all gets zeros of another rank's shape, or no rows.)
  AgreedBatches(std::shared_ptr<BatchSource> source, Strategy& strategy, UnevenData uneven);

  /// Collective.
  void start_epoch(std::uint64_t epoch);
  /// An epoch from where the source stood when this was called first, so that each has the same
  /// batches. Collective.
  void rewind();
  /// Goes on after restore() into the middle of an epoch. Collective.
  void resume(std::uint64_t epoch, std::uint64_t index);
  /// Collective where the source does not know its length or ends together.
  std::optional<MicroBatch> next();
  /// True if next() is known to give nothing; false where that is not known.
  bool known_end() const { return total_ && index_ >= *total_; }
  /// True if next() would give nothing, as far as sources know that. Collective.
  bool ended();
  /// The next batch has this number within the epoch.
  std::uint64_t index() const { return index_; }
  BatchSource& source() { return *source_; }

 private:
  void agree_on_length();
  std::optional<MicroBatch> filled(std::optional<MicroBatch> mine);
  void learn_shape();
  [[noreturn]] void refuse(const std::string& which) const;

  std::shared_ptr<BatchSource> source_;
  Strategy& strategy_;
  UnevenData uneven_;
  bool checked_ = false;
  std::optional<std::string> beginning_;
  std::uint64_t epoch_ = 0, index_ = 0;
  /// Batches of this epoch, over all ranks, if every rank knows its own.
  std::optional<std::uint64_t> total_;
  /// All ranks have the same number of batches, so that no rank lacks one.
  bool even_ = false;
  /// A rank that lacks one gets it.
  std::optional<MicroBatch> last_;
};

}  // namespace tessera
