#pragma once
// What ranks agree on through their store alone, without a connection between any two of them. The
// caller gives the time limits and gets what the store throws when they run out.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// Blocks until `size` ranks have called it with this key, and returns true on all of them if all
/// gave the same `value`. Costs four store operations, and two more on the last rank, for any
/// number of ranks.
bool agree_at_store(c10d::Store& store, const std::string& key, int size, std::uint64_t value,
                    std::chrono::milliseconds limit);

/// Returns the texts of all ranks, by rank. Each rank writes one key and reads one, in which rank 0
/// has put what it has read of all: equal texts once, so that the bytes do not grow with the square
/// of the number of ranks where most say the same.
std::vector<std::string> gather_at_store(c10d::Store& store, const std::string& key, int rank,
                                         int size, const std::string& mine,
                                         std::chrono::milliseconds limit);

/// Returns a name that all `size` ranks got in this life and no ranks before: a prefix for the keys
/// of a store that outlives its ranks, as that of torchrun's agent, which holds what ranks of an
/// earlier life have left, all or some of them. Throws Error if a rank does not come in time.
std::string name_of_life(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit);

}  // namespace tessera::detail
