#pragma once
// ShardedStream: many shards (files, archives, topics) read as one stream, which ranks divide and
// which goes on where it stopped, on any number of ranks.
//
//   struct Archives : StreamShards {
//     std::uint64_t size() const override { return paths.size(); }
//     std::unique_ptr<IterableDataset> open(std::uint64_t shard, std::uint64_t from)
//         const override;
//   };
//   StreamLoader loader(std::make_shared<Archives>(), {.lanes = 8}, 64, mesh.group("data"));

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera {

/// Shards that are read from their beginning, or from a sample on.
class StreamShards {
 public:
  virtual ~StreamShards();
  /// Number of shards; the same on every rank.
  virtual std::uint64_t size() const = 0;
  /// The samples of `shard` from number `from` on; none where it has no more. Called by one thread
  /// at a time: once for a shard, and again after an error or where a state is restored.
  virtual std::unique_ptr<IterableDataset> open(std::uint64_t shard, std::uint64_t from) const = 0;
};

struct ShardedStreamOptions {
  /// Number of shards that are open at the same time over all ranks. A divisor of the global
  /// batch's rows, at most the number of shards, at least the number of ranks that divide it; it
  /// decides the order, so that it stays the same when a run goes on elsewhere. 0: the largest that
  /// is not above 64.
  std::int64_t lanes = 0;
  /// Shards come in an order drawn anew for each epoch.
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// How often every shard is read; 0: without end.
  std::uint64_t epochs = 1;
};

/// Reads shards in lanes. Lane l has every lanes-th shard of an epoch's order, from the l-th on,
/// one after the other; a global batch has equally many rows of each lane, in the order of lanes.
/// So batches depend on shards and options alone, and a rank reads some of the lanes. (Fixed lanes
/// in place of ranks: the canonical nodes of MosaicML's streaming.) Not for several threads.
class ShardedStream {
 public:
  /// Where a lane is.
  struct Place {
    /// Number of shards that it has read to their end.
    std::uint64_t turn = 0;
    /// Number of samples of the present one that it has read.
    std::uint64_t sample = 0;
    bool operator==(const Place&) const = default;
  };

  /// `rows`: those of the global batch. Throws InvalidArgument for no shards or lanes out of range.
  ShardedStream(std::shared_ptr<const StreamShards> shards, ShardedStreamOptions options,
                std::int64_t rows);

  int lanes() const { return static_cast<int>(options_.lanes); }
  /// Rows of each lane in a batch.
  std::int64_t rows_of_lane() const { return rows_ / options_.lanes; }
  /// What the order depends on, as text.
  std::string describe() const;

  /// The lane's next sample; nullopt where its last epoch has ended. Throws what a shard throws
  /// (SampleError, with the shard and the sample's number in it); the lane is then where it was,
  /// and opens its shard again.
  std::optional<Sample> next(int lane);
  Place place(int lane) const { return lanes_[lane].place; }
  void go_to(int lane, Place place) { lanes_[lane] = {place, nullptr, 0}; }
  /// The lane at `place` has nothing more.
  bool dry(int lane, Place place) const;

 private:
  struct Lane {
    Place place;
    std::unique_ptr<IterableDataset> shard;  // null: to be opened
    std::uint64_t number = 0;                // of the shard
  };
  std::uint64_t turns(int lane) const;
  std::uint64_t shard_of(int lane, std::uint64_t turn) const;

  std::shared_ptr<const StreamShards> shards_;
  ShardedStreamOptions options_;
  std::int64_t rows_;
  std::uint64_t size_;
  std::vector<Lane> lanes_;
};

}  // namespace tessera
