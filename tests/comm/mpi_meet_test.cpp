// How the ranks of a new MPI group meet: all make it or none, whoever gives it up and when.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mpi_support.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_work.h"

namespace tessera::test {

extern std::unique_ptr<MpiWorld> world;

namespace {

// Ranks that share cores take long over each.
constexpr std::uint64_t kRounds = 12;

/// The same numbers on all ranks.
std::uint64_t drawn(std::uint64_t round, std::uint64_t rank, std::uint64_t below) {
  std::uint64_t x = round * 7919 + rank * 104729 + 12345;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 29)) * 6364136223846793005ull + 1442695040888963407ull;
  return (x >> 33) % below;
}

}  // namespace

TEST(MpiMeet, AllMakeTheGroupOrNone) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto control = backend(*world, all_ranks(*world), "control");
  int given_up_in = 0;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    // In turns the first rank of the list is another one. Each rank gives up after some looks.
    std::vector<int> ranks = all_ranks(*world);
    std::rotate(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(round % ranks.size()),
                ranks.end());
    const auto me = static_cast<std::uint64_t>(world->rank());
    const std::uint64_t most = std::uint64_t{1} << drawn(round, 99, 12);
    auto left = drawn(round, me, most);
    detail::MpiAttempt attempt{round, [&] { return left == 0 || --left == 0; }};
    MpiBackendOptions options;
    options.name = concat("try ", round);
    options.timeout = kLimit;
    bool made = false;
    try {
      const auto comm = detail::make_mpi_comm(context_of(*world), ranks, options, attempt);
      made = comm->size() == world->size();
    } catch (const PeerLostError& error) {
      EXPECT_NE(std::string(error.what()).find("was given up before its ranks had met"),
                std::string::npos)
          << error.what();
    }
    std::vector<at::Tensor> all{at::full({1}, made ? 1.0 : 0.0)};
    control->allreduce(all)->wait();
    const auto makers = all[0].item<double>();
    EXPECT_TRUE(makers == 0 || makers == world->size()) << "round " << round << ": " << makers;
    given_up_in += makers == 0;
  }
  // In one round at least a rank gives up at once.
  EXPECT_GT(given_up_in, 0);
  // What the tries have left is not in the way.
  backend(*world, all_ranks(*world), "after")->barrier(c10d::BarrierOptions())->wait();
}

// Each rank gives up some tries of one number, whenever, and then comes until the group is made: a
// rank that comes again while the first one is still in an older try is not forgotten.
TEST(MpiMeet, WhoComesAgainIsMet) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto me = static_cast<std::uint64_t>(world->rank());
  for (std::uint64_t round = 1; round <= 8 * kRounds; ++round) {
    std::vector<int> ranks = all_ranks(*world);
    std::rotate(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(round % ranks.size()),
                ranks.end());
    const auto give_ups = 1 + drawn(round, me, 6);
    MpiBackendOptions options;
    options.name = concat("round ", round);
    options.timeout = kLimit;
    std::uint64_t given_up = 0;
    bool made = false;
    while (!made) {
      // Up to some looks, a few or many; none once it has given up often enough.
      auto left = drawn(round * 100 + given_up, me, std::uint64_t{1} << drawn(round, 99, 12));
      const detail::MpiAttempt attempt{1000 + round, [&] {
                                         const bool now =
                                             given_up < give_ups && (left == 0 || --left == 0);
                                         given_up += now;
                                         return now;
                                       }};
      try {
        made = detail::make_mpi_comm(context_of(*world), ranks, options, attempt)->size() ==
               world->size();
      } catch (const PeerLostError&) {
        // This rank's own end of a try, or another one's.
      }
    }
  }
}

// The first rank makes a group while the others wait for a call that it has started.
TEST(MpiMeet, CallsInProgressGoOnMeanwhile) {
  const auto group = backend(*world, all_ranks(*world));
  std::vector<at::Tensor> t{at::ones({1000})};
  c10d::AllreduceOptions started;
  started.asyncOp = true;
  const auto work = group->allreduce(t, started);
  if (world->rank() != 0) work->wait();
  backend(*world, all_ranks(*world), "another")->barrier(c10d::BarrierOptions())->wait();
  work->wait();
  EXPECT_TRUE(t[0].eq(world->size()).all().item<bool>());
}

}  // namespace tessera::test
