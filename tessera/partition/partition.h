#pragma once
// Partition: one dim divided into consecutive shards of any sizes, zeros included.
//
//   Partition p({4, 0, 3});      // extent 7
//   p.interval(2) -> [4, 7)      p.owner(4) -> 2 (never the empty shard 1)

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/partition/interval.h"

namespace tessera {

class Partition {
 public:
  Partition() : offsets_{0} {}
  /// Throws InvalidArgument for a negative size.
  explicit Partition(std::span<const std::int64_t> sizes);
  explicit Partition(std::initializer_list<std::int64_t> sizes)
      : Partition(std::span(sizes.begin(), sizes.size())) {}

  /// Divides evenly; the first extent % parts shards have one more: even(7, 3) -> {3, 2, 2}.
  static Partition even(std::int64_t extent, int parts);
  /// Divides as torch.chunk does: every shard but the last non-empty ones has ceil(extent / parts)
  /// indices: chunked(5, 4) -> {2, 2, 1, 0}.
  static Partition chunked(std::int64_t extent, int parts);
  /// Divides in proportion to the weights, by largest remainder (ties: lower shard first):
  /// weighted(10, {1, 3}) -> {3, 7}; weights >= 0, finite, not all zero. Throws InvalidArgument for
  /// other weights.
  static Partition weighted(std::int64_t extent, std::span<const double> weights);

  int parts() const { return static_cast<int>(offsets_.size()) - 1; }
  std::int64_t extent() const { return offsets_.back(); }
  std::int64_t size(int part) const { return offsets_[part + 1] - offsets_[part]; }
  std::int64_t begin(int part) const { return offsets_[part]; }
  Interval interval(int part) const { return {offsets_[part], offsets_[part + 1]}; }
  std::vector<std::int64_t> sizes() const;

  /// The shard that holds index i. O(log parts). Throws InvalidArgument outside [0, extent).
  int owner(std::int64_t i) const;
  /// The shards that meet `range` in at least one index, as first and one past last; empty shards
  /// in between are included. {0, 0} if none does.
  Interval overlapping(Interval range) const;

  bool operator==(const Partition&) const = default;

 private:
  std::vector<std::int64_t> offsets_;  // parts + 1, the first 0
};

}  // namespace tessera
