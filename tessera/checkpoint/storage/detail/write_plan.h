#pragma once
// Write plan: which rank writes which box, so that every element is written once and the ranks
// write about the same number of bytes.
//
//   4 ranks; w [8, 4] sharded by rows over pairs {0, 1} and {2, 3} of replicas:
//   rank 0 writes rows 0 and 1, rank 1 rows 2 and 3, rank 2 rows 4 and 5, rank 3 rows 6 and 7
//
// Arithmetic: every rank makes the same plan from the same descriptions.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/storage/detail/manifest.h"

namespace tessera {

/// What one rank holds of an entry.
struct HeldShard {
  EntryInfo info;
  Box box;
};
/// The description that ranks exchange, and back. Throws InvalidArgument for a broken text.
std::string describe_shards(const std::vector<HeldShard>& held);
std::vector<HeldShard> shards_from(std::string_view text);

/// True if the box is the whole shape of the entry.
bool is_full(const EntryInfo& info, const Box& box);

/// A box that a rank writes; it holds all of it.
struct AssignedBox {
  /// Index into WritePlan::entries.
  std::size_t entry = 0;
  Box box;
};

struct WritePlan {
  std::vector<EntryInfo> entries;
  /// Of each rank, in the order of the entries.
  std::vector<std::vector<AssignedBox>> ranks;
};

inline constexpr std::uint64_t kSmallestPiece = 64 * 1024;

/// Of the plain tensors of a rank: numbers that are equal where names and contents are. `full`: of
/// those that are full tensors; `shards`: of those sharded by hand.
struct PlainSums {
  std::uint64_t full = 0, shards = 0;
};

/// `held[r]`: what rank r holds. Replicas of a box share it: each writes some of its rows (along
/// the first dim of more than one index), unless that made pieces of less than `smallest` bytes.
/// Plain tensors are shared only by ranks whose `sums` are equal; otherwise the first rank that
/// holds a box writes all of it, so that what is saved is one rank's set. No sums: all are equal.
/// Throws InvalidArgument with the entry and the ranks where they disagree on its dtype, shape or
/// layout, a rank names it twice, boxes overlap without being the same, or elements are missing.
WritePlan plan_writes(const std::vector<std::vector<HeldShard>>& held,
                      std::uint64_t smallest = kSmallestPiece,
                      const std::vector<PlainSums>& sums = {});

}  // namespace tessera
