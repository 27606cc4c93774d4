// Ranks that have a core each, and more ranks than cores: which way a call takes, and who waits.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <chrono>
#include <string>
#include <vector>

#include "cpus.h"
#include "drawn.h"
#include "tessera/base/text.h"

namespace tessera::shm::testing {
namespace {

TEST(Collectives, CoresOfTheirOwn) {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) GTEST_SKIP() << "one CPU alone";
  // Two ranks on CPU 0 share it, though there are others; ranks on 0 and 1 do not.
  for (const bool shared : {true, false})
    for (const auto& end : fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
           run_on({cpus[shared ? 0 : static_cast<std::size_t>(rank)]});
           Group group = Group::meet(rank, 2, directory, brief("cores"));
           group.barrier();
           return group.describe().crowded ? "crowded" : "free";
         }))
      EXPECT_EQ(end.report, shared ? "crowded" : "free");
}

// Ranks that share a core take other ways with much data: a tree, and shares out of each other's
// memory.
TEST(Collectives, LargeWhereRanksShareACore) {
  const std::vector<int> one = allowed_cpus(1);
  for (const int ranks : {2, 3, 6}) {
    SCOPED_TRACE(ranks);
    expect_good(fork_ranks(ranks, [&](int rank, const Directory& directory) -> std::string {
      run_on(one);
      Group group = Group::meet(rank, ranks, directory, brief("share"));
      if (!group.describe().crowded) return "not crowded";
      const std::size_t count = (std::size_t{1} << 17) + 5;
      // Rank r counts r-fold in the second.
      std::vector<double> sum(count), weighted_sum(count);
      for (int r = 0; r < ranks; ++r) {
        const auto values = drawn_values(7, r, count);
        for (std::size_t i = 0; i < count; ++i) {
          sum[i] += values[i];
          weighted_sum[i] += r * values[i];
        }
      }
      const auto mine = drawn_values(7, rank, count);
      std::vector<double> out(count), in_place = mine;
      group.all_reduce(mine.data(), out.data(), count, Element::float64, {});
      group.all_reduce(in_place.data(), in_place.data(), count, Element::float64, {});
      if (out != sum || in_place != sum) return "sums differ";
      if (mine != drawn_values(7, rank, count)) return "the input was written";
      std::vector<double> weighted(count);
      group.all_reduce(mine.data(), weighted.data(), count, Element::float64,
                       {Reduction::Kind::premultiplied, static_cast<double>(rank)});
      if (weighted != weighted_sum) return "weighted sums differ";
      // Several under way, from every root.
      std::vector<Bytes> data;
      std::vector<Request> requests;
      for (int root = 0; root < ranks; ++root)
        data.push_back(rank == root ? drawn_bytes(root, root, 300001) : Bytes(300001));
      for (int root = 0; root < ranks; ++root)
        requests.push_back(
            group.started().broadcast(data[static_cast<std::size_t>(root)].data(), 300001, root));
      requests.push_back(
          group.started().all_reduce(out.data(), out.data(), count, Element::float64, {}));
      for (auto& request : requests) request.wait();
      for (int root = 0; root < ranks; ++root)
        if (data[static_cast<std::size_t>(root)] != drawn_bytes(root, root, 300001))
          return concat("broadcast of rank ", root);
      for (std::size_t i = 0; i < count; ++i)
        if (out[i] != ranks * sum[i]) return concat("started sum, element ", i);
      return "";
    }));
  }
}

std::chrono::microseconds cpu_time() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto of = [](const timeval& time) {
    return std::chrono::seconds(time.tv_sec) + std::chrono::microseconds(time.tv_usec);
  };
  return of(used.ru_utime) + of(used.ru_stime);
}

// More ranks than cores: a rank that waits leaves its core to those that it waits for.
TEST(Collectives, WhoWaitsLeavesTheCore) {
  const std::vector<int> two = allowed_cpus(2);
  constexpr auto kWork = std::chrono::milliseconds(300);
  for (const int ranks : {4, 8}) {
    SCOPED_TRACE(ranks);
    expect_good(fork_ranks(ranks, [&](int rank, const Directory& directory) -> std::string {
      run_on(two);
      Group group = Group::meet(rank, ranks, directory, brief("crowd"));
      if (!group.describe().crowded) return "it takes each rank for one with a core of its own";
      // Small and large calls after each other, so that every rank waits for every other.
      for (int round = 0; round < 50; ++round)
        for (const std::size_t count : {std::size_t{1}, std::size_t{600}, std::size_t{40000}}) {
          std::vector<double> values(count, rank + round);
          group.all_reduce(values.data(), values.data(), count, Element::float64, {});
          const double sum = ranks * round + ranks * (ranks - 1) / 2.0;
          if (values.front() != sum || values.back() != sum) return concat("round ", round);
        }
      // One rank computes, and all others wait for it.
      double value = 1;
      const auto begin = cpu_time();
      if (rank == 1)
        while (cpu_time() < begin + kWork) value = value * 0.5 + 0.5;
      group.all_reduce(&value, &value, 1, Element::float64, {});
      const auto used = cpu_time() - begin;
      if (value != ranks) return concat("the sum is ", value);
      if (rank != 1 && used > kWork / 4)
        return concat("waited with ", used.count(), " us of a core's time");
      return "";
    }));
  }
}

}  // namespace
}  // namespace tessera::shm::testing
