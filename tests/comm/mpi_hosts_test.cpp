// Groups over several hosts whose first ranks talk over MPI; on_hosts.h says which rank is where.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives_cases.h"
#include "mpi_on_hosts.h"

namespace tessera::test {

extern std::unique_ptr<MpiWorld> world;

namespace {

/// Returns when all ranks have come: one that leaves its job would end the others' meetings there.
void meet_all() { backend(*world, all_ranks(*world), "end")->barrier()->wait(); }

ManagerOptions options_between(const std::string& between) {
  ManagerOptions options;
  options.timeout = kLimit;
  options.between_hosts = between;
  return options;
}

/// A manager of ranks on two hosts in turns, or (`apart`) each on its own.
DistributedManager on_hosts(const std::string& between, bool apart,
                            const std::optional<MpiWorld>& mpi) {
  const int host = apart ? world->rank() : world->rank() % 2;
  return testing::manager_on_host(launch_with_store(*world), host, options_between(between), mpi);
}

bool few_ranks_or_threads() {
  return world->size() < 3 || world->thread_level() < MpiThreadLevel::serialized;
}

}  // namespace

TEST(MpiHosts, TheFirstRanksOfHostsTalkOverMpi) {
  if (few_ranks_or_threads()) GTEST_SKIP() << "needs 3 ranks and calls from threads";
  const auto manager = on_hosts("auto", false, *world);
  const auto group = manager.world();
  EXPECT_EQ(group.backend(), "hosts");
  EXPECT_EQ(group.backend_reason(),
            concat("its ", world->size(),
                   " ranks are on 2 hosts: memory inside a host, mpi between the hosts (ranks 0 "
                   "and 1 are on different hosts)"));
  testing_cases::check_everything(group, {at::kFloat, at::kBFloat16, at::kBool});
  meet_all();
}

// Two groups whose threads call MPI at the same time.
TEST(MpiHosts, GroupsGoOnBesideEachOther) {
  if (few_ranks_or_threads()) GTEST_SKIP() << "needs 3 ranks and calls from threads";
  const auto manager = on_hosts("mpi", false, *world);
  const int n = world->size();
  std::vector<int> backwards = all_ranks(*world);
  std::ranges::reverse(backwards);
  const Group one = manager.world(), two = manager.group(backwards);
  EXPECT_NE(two.backend_reason().find("mpi between the hosts"), std::string::npos);
  std::vector<at::Tensor> sums;
  std::vector<Request> requests;
  for (int i = 0; i < 10; ++i) {
    for (const auto* group : {&one, &two}) {
      sums.push_back(at::full({1000 * (i + 1)}, world->rank() + i, at::kDouble));
      requests.push_back(group->started().all_reduce(sums.back()));
    }
  }
  if (world->rank() % 2 == 0) std::ranges::reverse(requests);
  for (auto& request : requests) request.wait();
  for (std::size_t i = 0; i < sums.size(); ++i)
    EXPECT_EQ(sums[i][0].item<double>(), n * static_cast<double>(i / 2) + n * (n - 1) / 2.0);
  meet_all();
}

TEST(MpiHosts, RanksThatShareNoHostUseMpiAlone) {
  if (world->size() < 2 || world->thread_level() < MpiThreadLevel::serialized)
    GTEST_SKIP() << "needs 2 ranks and calls from threads";
  const auto manager = on_hosts("auto", true, *world);
  const auto group = manager.world();
  EXPECT_EQ(group.backend(), "mpi") << group.backend_reason();
  const auto t = at::full({5}, world->rank() + 1.0, at::kDouble);
  group.all_reduce(t);
  EXPECT_EQ(t[4].item<double>(), world->size() * (world->size() + 1) / 2.0);
  meet_all();
}

TEST(MpiHosts, GlooIsUsedWhereItIsAskedForOrARankHasNoMpi) {
  if (world->size() < 3) GTEST_SKIP() << "needs 3 ranks";
  {
    const auto manager = on_hosts("gloo", false, *world);
    EXPECT_NE(manager.world().backend_reason().find("gloo between the hosts"), std::string::npos);
    EXPECT_EQ(manager.world().backend_reason().find("mpi"), std::string::npos);
    meet_all();
  }
  const auto without = world->rank() == 1 ? std::nullopt : std::optional<MpiWorld>(*world);
  {
    const auto manager = on_hosts("auto", false, without);
    const auto reason = manager.world().backend_reason();
    if (world->thread_level() >= MpiThreadLevel::serialized) {
      EXPECT_NE(reason.find("not mpi: rank 1 says that it was not given ranks of MPI"),
                std::string::npos)
          << reason;
    }
    const auto t = at::ones({5});
    manager.world().all_reduce(t);
    EXPECT_EQ(t[0].item<double>(), world->size());
    meet_all();
  }
  const auto manager = on_hosts("mpi", false, without);
  EXPECT_THROW(manager.world(), NotAvailable);
  meet_all();
}

// All ranks are on one host: MPI is not used.
TEST(MpiHosts, AManagerOfRanksOfMpiUsesMemoryInsideAHost) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  auto options = options_between("auto");
  options.mpi = *world;
  options.backend = "auto";
  EXPECT_THROW(DistributedManager::initialize(options), InvalidArgument);
  options.launch = launch_with_store(*world);
  const auto manager = DistributedManager::initialize(options);
  EXPECT_EQ(manager.world().backend(), "shm") << manager.world().backend_reason();
  meet_all();
}

}  // namespace tessera::test
