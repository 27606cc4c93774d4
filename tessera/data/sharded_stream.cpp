#include "tessera/data/sharded_stream.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/sampling/permutation.h"

namespace tessera {

StreamShards::~StreamShards() = default;

namespace {

std::int64_t usual_lanes(std::int64_t rows, std::uint64_t shards) {
  std::int64_t lanes = 1;
  for (std::int64_t n = 2; n <= std::min<std::int64_t>(rows, 64); ++n)
    if (rows % n == 0 && static_cast<std::uint64_t>(n) <= shards) lanes = n;
  return lanes;
}

}  // namespace

ShardedStream::ShardedStream(std::shared_ptr<const StreamShards> shards,
                             ShardedStreamOptions options, std::int64_t rows)
    : shards_(std::move(shards)),
      options_(options),
      rows_(rows),
      size_(shards_ ? shards_->size() : 0) {
  if (size_ == 0 || rows < 1)
    throw InvalidArgument("a sharded stream of ", size_, " shards with batches of ", rows,
                          " rows; it needs at least 1 of both");
  if (options_.lanes == 0) options_.lanes = usual_lanes(rows, size_);
  if (options_.lanes < 1 || rows % options_.lanes != 0 ||
      static_cast<std::uint64_t>(options_.lanes) > size_)
    throw InvalidArgument(options_.lanes, " lanes for ", size_, " shards and batches of ", rows,
                          " rows; lanes are a divisor of the rows of the global ",
                          "batch, and at most as many as shards");
  lanes_.resize(static_cast<std::size_t>(options_.lanes));
}

std::string ShardedStream::describe() const {
  return concat("sharded stream: ", size_, " shards, ", options_.lanes, " lanes, seed ",
                options_.seed, options_.shuffle ? ", shuffled, " : ", in order, ", options_.epochs,
                " epochs, batches of ", rows_, " rows");
}

std::uint64_t ShardedStream::turns(int lane) const {
  const auto lanes = static_cast<std::uint64_t>(options_.lanes);
  return (size_ - static_cast<std::uint64_t>(lane) + lanes - 1) / lanes;
}

bool ShardedStream::dry(int lane, Place place) const {
  return options_.epochs != 0 && place.turn / turns(lane) >= options_.epochs;
}

std::uint64_t ShardedStream::shard_of(int lane, std::uint64_t turn) const {
  const std::uint64_t epoch = turn / turns(lane);
  const std::uint64_t at = static_cast<std::uint64_t>(lane) +
                           turn % turns(lane) * static_cast<std::uint64_t>(options_.lanes);
  return options_.shuffle ? KeyedPermutation(size_, options_.seed, epoch)(at) : at;
}

std::optional<Sample> ShardedStream::next(int lane) {
  Lane& of = lanes_[static_cast<std::size_t>(lane)];
  // An epoch without any sample would be followed by others like it.
  for (std::uint64_t empty = 0; !dry(lane, of.place); ++empty) {
    if (options_.epochs == 0 && empty > size_)
      throw Error("lane ", lane, " has read ", empty, " shards without a sample, up to ", of.number,
                  "; in a stream without end some have one");
    try {
      if (!of.shard) {
        of.number = shard_of(lane, of.place.turn);
        of.shard = shards_->open(of.number, of.place.sample);
      }
      if (!of.shard) throw InvalidArgument("open() gave no dataset");
      if (auto sample = of.shard->next()) {
        ++of.place.sample;
        return sample;
      }
    } catch (const std::exception& e) {
      of.shard.reset();
      std::throw_with_nested(
          SampleError(concat("shard ", of.number, ", sample ", of.place.sample, ": ", e.what()),
                      of.place.sample));
    } catch (...) {
      of.shard.reset();
      throw;
    }
    of = {{of.place.turn + 1, 0}, nullptr, 0};
  }
  return std::nullopt;
}

}  // namespace tessera
