#pragma once
// What ranks settle through their store alone, without a connection between any two of them. Limits
// are the caller's: what the store throws after them passes through.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// Blocks until `size` ranks have called it with this key, and tells all of them whether all came
/// with the same value. Four store operations, and two more for the last rank, however many ranks
/// there are.
bool agree_at_store(c10d::Store& store, const std::string& key, int size, std::uint64_t value,
                    std::chrono::milliseconds limit);

/// What every rank brought, by rank: one write and one read of `size` keys.
std::vector<std::string> gather_at_store(c10d::Store& store, const std::string& key, int rank,
                                         int size, const std::string& mine,
                                         std::chrono::milliseconds limit);

}  // namespace tessera::detail
