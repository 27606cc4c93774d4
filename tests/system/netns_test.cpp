// Ranks on two hosts that are network namespaces (two_hosts.h).

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "../comm/collectives_cases.h"
#include "../comm/soak.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/store.h"
#include "two_hosts.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

/// Unequal hosts: ranks 0, 1 on alpha and 2 on beta; the environment is Slurm's.
struct Place {
  int host, local_rank, local_size;
};
Place place_of(int rank) { return rank < 2 ? Place{0, rank, 2} : Place{1, 0, 1}; }

void set_environment(int rank, int port) {
  const Place place = place_of(rank);
  for (const auto& [name, value] : std::vector<std::pair<const char*, std::string>>{
           {"SLURM_JOB_ID", "77"},
           {"SLURM_STEP_ID", "0"},
           {"SLURM_NTASKS", "3"},
           {"SLURM_PROCID", std::to_string(rank)},
           {"SLURM_LOCALID", std::to_string(place.local_rank)},
           {"SLURM_NODEID", std::to_string(place.host)},
           {"SLURM_STEP_NODELIST", "alpha,beta"},
           {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
           {"MASTER_ADDR", TwoHosts::address(0)},
           {"MASTER_PORT", std::to_string(port)}})
    ::setenv(name, value.c_str(), 1);
}

// 10.213.77.x as /proc/net/tcp writes it
std::string hex_address(int host) { return concat("0", host + 1, "4DD50A"); }

/// Every listener of this namespace is bound to the host's own address on the cable.
void require_listeners(int host, int port) {
  int listeners = 0;
  bool store = false;
  for (const char* file : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream in(file);
    std::string line, slot, local, remote, state;
    for (std::getline(in, line); std::getline(in, line);) {
      std::istringstream(line) >> slot >> local >> remote >> state;
      if (state != "0A") continue;
      ++listeners;
      require(local.substr(0, local.find(':')) == hex_address(host),
              concat("a listener on ", local, " in ", file));
      store = store || std::stoi(local.substr(local.find(':') + 1), nullptr, 16) == port;
    }
  }
  require(listeners > 0 && store == (host == 0),
          concat(listeners, " listeners on host ", host, ", the store's among them: ", store));
}

DistributedManager start(const TwoHosts& hosts, const Launch& from_test,
                         const std::string& backend = "gloo") {
  at::set_num_threads(1);
  hosts.enter(place_of(from_test.rank).host);
  set_environment(from_test.rank, from_test.port);
  ManagerOptions options;
  options.timeout = 40s;
  options.rendezvous_timeout = 30s;
  options.backend = backend;
  return DistributedManager::initialize(options);
}

std::int64_t reduced_rank(const DistributedManager& manager, const Group& group) {
  const auto rank = at::full({1}, manager.rank(), at::TensorOptions().dtype(at::kLong));
  group.all_reduce(rank);
  return rank.item<std::int64_t>();
}

void expect_ok(const std::vector<testing::RankEnd>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].ended) << "rank " << rank << " hung";
    EXPECT_EQ(ends[rank].report, "ok") << "rank " << rank << ", exit code " << ends[rank].exit_code
                                       << ", signal " << ends[rank].signal;
  }
}

TEST(TwoHosts, RanksMeetOnTheCableAloneAndKnowTheirPlaces) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  expect_ok(testing::fork_ranks(
      3,
      [&](const Launch& from_test) {
        auto manager = start(hosts, from_test);
        const Place place = place_of(from_test.rank);
        const Launch& launch = manager.launch();
        require(
            launch.launcher == "slurm" && launch.hosts == std::vector<std::string>{"alpha", "beta"},
            "hosts");
        require(launch.ranks_per_host == std::vector<int>{2, 1} && launch.node_rank == place.host,
                "ranks per host");
        require(manager.local_rank() == place.local_rank && launch.local_size == place.local_size,
                "local rank");
        require(reduced_rank(manager, manager.world()) == 3, "the sum over the world");
        require(reduced_rank(manager, manager.group(place.host == 0 ? std::vector<int>{1, 0}
                                                                    : std::vector<int>{2})) ==
                    (place.host == 0 ? 1 : 2),
                "inside a host");
        if (from_test.rank != 1)
          require(reduced_rank(manager, manager.group({2, 0})) == 2, "between hosts");
        const auto mesh = manager.mesh(Mesh({{"data", 3}}, {2, 0, 1}));
        require(reduced_rank(manager, mesh.group("data")) == 3 &&
                    mesh.coordinate()[0] == (from_test.rank + 1) % 3,
                "a mesh that is not in rank order");
        require_listeners(place.host, from_test.port);
        manager.world().barrier();
        return std::string("ok");
      },
      90s));
}

TEST(TwoHosts, GroupsUseMemoryInsideAHostAndGlooBetweenThem) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  expect_ok(testing::fork_ranks(
      3,
      [&](const Launch& from_test) {
        auto manager = start(hosts, from_test, "auto");
        const Group world = manager.world();
        require(world.backend() == "hosts", concat(world.backend(), ": ", world.backend_reason()));
        require(world.backend_reason().find("ranks 0 and 2 are in different network namespaces") !=
                    std::string::npos,
                world.backend_reason());
        if (from_test.rank != 2)
          require(manager.group({1, 0}).backend() == "shm", "ranks of one host");
        if (from_test.rank != 1)
          require(manager.group({0, 2}).backend() == "gloo", "ranks of two hosts");
        testing_cases::check_everything(world, {at::kFloat, at::kBFloat16});
        require(!::testing::Test::HasFailure(), "values");
        world.barrier();
        return std::string("ok");
      },
      90s));
}

void cut_the_cable(const std::string& backend) {
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  expect_ok(testing::fork_ranks(
      3,
      [&](const Launch& from_test) {
        auto manager = start(hosts, from_test, backend);
        Group world = manager.world();
        world.barrier();
        world.set_timeout(2s);
        if (from_test.rank == 0) hosts.cut();
        const auto begin = std::chrono::steady_clock::now();
        try {
          for (;;) reduced_rank(manager, world);
        } catch (const TimeoutError& error) {
          const auto& missing = error.missing();
          // The store is with rank 0: there it is known that rank 2 is silent; rank 2 knows only
          // that rank 0 is. A neighbour may be a call behind when the cable is cut, and is missing
          // then as well.
          const int silent = from_test.rank == 2 ? 0 : 2;
          require(std::ranges::find(missing, silent) != missing.end(),
                  concat("missing ", list(missing), ": ", error.what()));
        }
        require(std::chrono::steady_clock::now() - begin < 15s, "it took too long");
        return std::string("ok");
      },
      90s));
}

TEST(TwoHosts, ACutCableIsATimeOutOnBothSides) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  for (const char* backend : {"gloo", "auto"}) cut_the_cable(backend);
}

TEST(TwoHosts, AnAddressThatNobodyAnswersEndsInTime) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  const auto ends = testing::fork_ranks(
      2,
      [&](const Launch& from_test) {
        hosts.enter(1);
        Launch launch;
        launch.rank = 1;
        launch.world_size = 2;
        launch.hosts = {"alpha", "beta"};
        // no host on the cable; no route
        launch.address = from_test.rank == 0 ? "10.213.77.99" : "10.99.99.99";
        launch.port = from_test.port;
        const auto begin = std::chrono::steady_clock::now();
        try {
          Rendezvous::meet(launch, 1s);
        } catch (const RendezvousError& error) {
          require(std::string(error.what()).find(launch.address) != std::string::npos,
                  error.what());
          require(std::chrono::steady_clock::now() - begin < 5s, "it took too long");
          return std::string("ok");
        }
        return std::string("it met another rank");
      },
      30s);
  expect_ok(ends);
}

// Four ranks of two hosts make and close groups while strangers knock, and beside them job after
// job ends by the death of a rank: nothing is left of either. `make soak` runs it for hours.
TEST(Soak, AJobLivesWhileOthersDieOnTwoHosts) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  const auto time = testing::soak_time(8);
  const testing::SoakPlace place{{0, 0, 1, 1}, [&](Launch& launch) {
                                   launch.hosts = {"alpha", "beta"};
                                   launch.ranks_per_host = {2, 2};
                                   launch.node_rank = launch.rank / 2;
                                   launch.local_rank = launch.rank % 2;
                                   launch.local_size = 2;
                                   launch.address = TwoHosts::address(0);
                                   launch.secret = "a soak on two hosts";
                                   hosts.enter(launch.node_rank);
                                 }};
  const int descriptors = testing::entries("/proc/self/fd");
  std::fflush(nullptr);
  const pid_t dying = ::fork();
  if (dying == 0) {
    const int jobs = testing::die(place, time);
    std::printf("%d jobs whose rank died\n", jobs);
    std::fflush(stdout);
    ::_exit(::testing::Test::HasFailure() || jobs == 0 ? 1 : 0);
  }
  const auto ends = testing::fork_ranks(
      4, [&](const Launch& launch) { return testing::live(place, launch, time); }, time + 60s);
  int status = 0;
  ASSERT_EQ(::waitpid(dying, &status, 0), dying);
  EXPECT_EQ(status, 0) << "of the jobs that die";
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].ended) << "rank " << rank << " hung";
    EXPECT_EQ(ends[rank].report.rfind("ok after", 0), 0u)
        << ends[rank].report << " signal " << ends[rank].signal;
    std::printf("rank %zu: %s\n", rank, ends[rank].report.c_str());
  }
  EXPECT_EQ(testing::entries("/proc/self/fd"), descriptors);
}

}  // namespace
}  // namespace tessera
