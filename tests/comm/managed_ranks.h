#pragma once
// Ranks with a manager each that are threads or processes, and what they require of their groups.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"

namespace tessera::manager_test {

// Checks throw, so that they end a rank whether it is a thread or a forked process.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

inline std::int64_t reduced_rank(const DistributedManager& manager, const Group& group) {
  const auto rank = at::full({1}, manager.rank(), at::TensorOptions().dtype(at::kLong));
  group.all_reduce(rank);
  return rank.item<std::int64_t>();
}

/// The group's list is `ranks`, this rank stands where it should, and an all-reduce over it gives
/// the sum of the list.
inline void require_group(const DistributedManager& manager, const Group& group,
                          const std::vector<int>& ranks) {
  require(group.ranks() == ranks,
          concat("the group has ranks ", list(group.ranks()), " instead of ", list(ranks)));
  require(ranks[group.rank()] == manager.rank(),
          concat("rank ", manager.rank(), " is not at place ", group.rank(), " of ", list(ranks)));
  const auto sum = reduced_rank(manager, group);
  require(sum == std::accumulate(ranks.begin(), ranks.end(), std::int64_t{0}),
          concat("the sum over ", list(ranks), " is ", sum));
}

inline std::string in_process(const Launch& launch,
                              const std::function<void(DistributedManager&)>& body,
                              std::chrono::milliseconds limit = std::chrono::seconds(30)) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = limit;
  auto manager = DistributedManager::initialize(options);
  body(manager);
  return "ok";
}

inline void run_processes(int ranks, const std::function<void(DistributedManager&)>& body,
                          std::chrono::milliseconds limit = std::chrono::seconds(30)) {
  const auto ends = testing::fork_ranks(
      ranks, [&](const Launch& launch) { return in_process(launch, body, limit); },
      std::chrono::seconds(60));
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(ends[rank].ended) << "rank " << rank << " hung";
    EXPECT_EQ(ends[rank].report, "ok") << "rank " << rank << ", exit code " << ends[rank].exit_code
                                       << ", signal " << ends[rank].signal;
  }
}

}  // namespace tessera::manager_test
