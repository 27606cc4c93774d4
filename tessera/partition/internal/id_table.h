#pragma once
// IdTable: a number, at least 0, for each of many ids. Open addressing in one block of memory, 20
// to 40 bytes an id.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::detail {

/// All bits depend on all bits of the id, so that ids in a regular pattern are spread evenly.
inline std::uint64_t mixed(std::int64_t id) {
  std::uint64_t x = static_cast<std::uint64_t>(id) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

class IdTable {
 public:
  /// For at most `most` ids.
  explicit IdTable(std::size_t most)
      : entries_(std::bit_ceil(most + most / 4 + 2)),
        shift_(64 - std::countr_zero(entries_.size())) {}

  /// The number of `id`, or -1.
  std::int64_t find(std::int64_t id) const { return entries_[place(id)].number; }
  /// Returns the number that `id` has; if it has none it gets `number`.
  std::int64_t insert(std::int64_t id, std::int64_t number) {
    Entry& entry = entries_[place(id)];
    if (entry.number < 0) entry = {id, number};
    return entry.number;
  }

 private:
  struct Entry {
    std::int64_t id = 0, number = -1;
  };
  /// Where the id is, or would be. The upper bits choose: the lower ones may be alike in all ids of
  /// a table, as they choose homes.
  std::size_t place(std::int64_t id) const {
    std::size_t at = static_cast<std::size_t>(mixed(id) >> shift_);
    while (entries_[at].number >= 0 && entries_[at].id != id) at = (at + 1) & (entries_.size() - 1);
    return at;
  }

  std::vector<Entry> entries_;
  int shift_;
};

}  // namespace tessera::detail
