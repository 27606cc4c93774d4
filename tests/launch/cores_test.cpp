#include "tessera/launch/internal/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"

namespace tessera {
namespace {

TEST(Cores, BudgetIsWhatAffinityAllows) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  const CpuBudget budget = cpu_budget();
  EXPECT_EQ(static_cast<int>(budget.cpus.size()), CPU_COUNT(&set));
  for (int cpu : budget.cpus) EXPECT_TRUE(CPU_ISSET(cpu, &set));
  EXPECT_GE(budget.usable(), 1);
  EXPECT_LE(budget.usable(), CPU_COUNT(&set));
}

TEST(Cores, QuotaLimitsWhatIsUsable) {
  CpuBudget budget{{0, 1, 2, 3}, 0};
  EXPECT_EQ(budget.usable(), 4);
  budget.quota = 1.5;
  EXPECT_EQ(budget.usable(), 2);
  budget.quota = 0.1;
  EXPECT_EQ(budget.usable(), 1);
  budget.quota = 64;
  EXPECT_EQ(budget.usable(), 4);
}

TEST(Cores, ThreadsNeverExceedTheShareAndAreAtLeastOne) {
  for (int cores = 1; cores <= 20; ++cores) {
    for (int ranks = 1; ranks <= 20; ++ranks) {
      const int threads = threads_per_rank(cores, ranks);
      EXPECT_GE(threads, 1);
      if (ranks <= cores) {
        EXPECT_LE(threads * ranks, cores);
        EXPECT_GT((threads + 1) * ranks, cores);
      }
    }
  }
  EXPECT_THROW(threads_per_rank(4, 0), InvalidArgument);
}

TEST(Cores, SharesAreConsecutiveDisjointAndEven) {
  for (int n = 1; n <= 17; ++n) {
    std::vector<int> cpus(n);
    std::iota(cpus.begin(), cpus.end(), 3);
    for (int ranks = 1; ranks <= 20; ++ranks) {
      const auto shares = share_cpus(cpus, ranks);
      ASSERT_EQ(static_cast<int>(shares.size()), ranks);
      if (ranks > n) {
        for (int r = 0; r < ranks; ++r) EXPECT_EQ(shares[r], std::vector<int>{cpus[r % n]});
        continue;
      }
      std::vector<int> joined;
      std::size_t least = cpus.size(), most = 0;
      for (const auto& share : shares) {
        joined.insert(joined.end(), share.begin(), share.end());
        least = std::min(least, share.size());
        most = std::max(most, share.size());
      }
      EXPECT_EQ(joined, cpus);
      EXPECT_LE(most - least, 1u);
    }
  }
  EXPECT_THROW(share_cpus({}, 1), InvalidArgument);
  EXPECT_THROW(share_cpus({0}, 0), InvalidArgument);
}

}  // namespace
}  // namespace tessera
