// What the job survives: a member that dies while a group is made, children of a rank that outlive
// it, limits without end, memory, threads and descriptors that run out.

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <sstream>

#include "../support/sanitized.h"
#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/threads.h"
#include "tessera/comm/store/detail/job_store.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/store.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::kSanitized;
using testing::fork_ranks;

ManagerOptions options_of(const Launch& launch, milliseconds timeout) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = timeout;
  options.rendezvous_timeout = 30s;
  return options;
}

/// "lost [2] 35", "timeout [] 60000", "none": the error that `call` ends with, and after how long.
std::string error_of(const std::function<void()>& call) {
  const auto begin = steady_clock::now();
  const auto told = [&](const char* kind, const std::vector<int>& ranks) {
    return concat(kind, " ", list(ranks), " ",
                  std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin).count());
  };
  try {
    call();
  } catch (const PeerLostError& error) {
    return told("lost", error.ranks());
  } catch (const TimeoutError& error) {
    return told("timeout", error.missing());
  } catch (const std::exception& error) {
    return told(error.what(), {});
  }
  return "none";
}

int milliseconds_of(const std::string& report) {
  return std::atoi(report.substr(report.rfind(' ') + 1).c_str());
}

std::size_t status_kib(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.rfind(field + ":", 0) == 0)
      return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10);
  return 0;
}

/// Lets this process map so much more than it has now.
void allow_memory(std::size_t mib) {
  const rlim_t limit = (status_kib("VmSize") + mib * 1024) * 1024;
  const rlimit both{limit, limit};
  ::setrlimit(RLIMIT_AS, &both);
}

/// Kills its process once it has said where it listens, when it would look for the others.
class DyingStore : public detail::JobStore {
 public:
  DyingStore(std::shared_ptr<detail::StoreConnection> connection, milliseconds limit)
      : JobStore(connection, limit), connection_(std::move(connection)) {}
  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<DyingStore>(connection_, timeout_);
  }
  using JobStore::set;
  using JobStore::wait;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    JobStore::multiSet(keys, values);
    if (keys.front().rfind("group/", 0) == 0) armed() = true;
  }
  void wait(const std::vector<std::string>& keys, const milliseconds& limit) override {
    if (armed()) die(keys);
    JobStore::wait(keys, limit);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    if (armed()) die(keys);
    return JobStore::multiGet(keys);
  }

 private:
  static std::atomic<bool>& armed() {
    static std::atomic<bool> said{false};
    return said;
  }
  // Once the others have read it, and are about to connect.
  void die(const std::vector<std::string>&) {
    std::this_thread::sleep_for(5ms);
    ::kill(::getpid(), SIGKILL);
    ::pause();
  }
  std::shared_ptr<detail::StoreConnection> connection_;
};

TEST(Survival, AMemberDiesWhileAGroupIsMade) {
  for (const int victim : {1, 2}) {
    const auto ends = fork_ranks(
        3,
        [&](const Launch& launch) {
          detail::ManagerBase base;
          base.options = options_of(launch, 20s);
          base.launch = launch;
          base.backend = "gloo";
          base.rendezvous = Rendezvous::meet(launch, 20s);
          if (launch.rank == victim)
            base.rendezvous->store =
                c10::make_intrusive<DyingStore>(base.rendezvous->connection, 20s);
          const DistributedManager manager(std::make_shared<detail::ManagerState>(std::move(base)));
          return error_of([&] { manager.world().barrier(); });
        },
        60s);
    EXPECT_EQ(ends[static_cast<std::size_t>(victim)].signal, SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const auto& end = ends[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(end.ended) << "rank " << rank << " hung";
      EXPECT_EQ(end.exit_code, 0) << end.signal << " " << end.report;
      EXPECT_EQ(end.report.rfind(concat("lost [", victim, "]"), 0), 0u) << end.report;
      EXPECT_LT(milliseconds_of(end.report), 10000) << end.report;
    }
  }
}

TEST(Survival, AMemberThatNeverComesEndsTheMakingAtItsLimit) {
  const auto ends = fork_ranks(
      3,
      [&](const Launch& launch) -> std::string {
        const auto manager = DistributedManager::initialize(options_of(launch, 3s));
        const auto store = manager.state()->base().store;
        if (launch.rank == 2) {  // runs, and does something else until both have been told
          store->wait({"0 is told", "1 is told"}, 30s);
          return "none";
        }
        const std::string end = error_of([&] { (void)manager.world(); });
        store->set(concat(launch.rank, " is told"), std::vector<std::uint8_t>{1});
        return end;
      },
      40s);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ends[rank].report.rfind("timeout [2]", 0), 0u) << ends[rank].report;
    EXPECT_LT(milliseconds_of(ends[rank].report), 3000 + 4000) << ends[rank].report;
  }
}

TEST(Survival, AForkedChildDoesNotKeepADeadRankAlive) {
  for (const int victim : {0, 2}) {
    const auto ends = fork_ranks(
        3,
        [&](const Launch& launch) -> std::string {
          const auto manager = DistributedManager::initialize(options_of(launch, 60s));
          const Group world = manager.world();
          world.barrier();
          // The fault comes once all have left the barrier: who is still in it would fail there.
          const auto store = manager.state()->base().store->clone();
          if (store->add("through", 1) == 3) store->set("all through", "1");
          if (launch.rank == victim) {
            store->wait({"all through"});
            if (::fork() == 0) {
              ::alarm(30);
              for (;;) ::pause();  // as a worker of a data loader may
            }
            ::kill(::getpid(), SIGKILL);
          }
          return error_of([&] { world.barrier(); });
        },
        50s);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(ends[rank].report.rfind(concat("lost [", victim, "]"), 0), 0u) << ends[rank].report;
      EXPECT_LT(milliseconds_of(ends[rank].report), 10000) << ends[rank].report;
    }
  }
}

TEST(Survival, AForkedChildMayEndAsItLikes) {
  // Its copies of our objects must not deregister the rank.
  const auto ends = fork_ranks(
      2,
      [&](const Launch& launch) -> std::string {
        detail::Socket pipe_end;
        const auto meeting = Rendezvous::meet(launch, 20s);
        if (launch.rank == 1) {
          const pid_t child = ::fork();
          if (child == 0) {
            meeting.connection->leave();
            meeting.connection->disconnect();
            ::_exit(0);
          }
          ::waitpid(child, nullptr, 0);
        }
        meeting.store->add("here", 1);
        while (meeting.store->add("here", 0) < 2) std::this_thread::sleep_for(1ms);
        meeting.store->add("done", 1);
        while (meeting.store->add("done", 0) < 2) std::this_thread::sleep_for(1ms);
        if (meeting.server) meeting.server->set_linger(5s);
        meeting.connection->leave();
        return "met";
      },
      30s);
  for (const auto& end : ends) EXPECT_EQ(end.report, "met");
}

TEST(Survival, TheLongestLimitThereIs) {
  const auto ends = fork_ranks(
      2,
      [](const Launch& launch) -> std::string {
        auto options = options_of(launch, milliseconds::max());
        options.rendezvous_timeout = milliseconds::max();
        const auto manager = DistributedManager::initialize(options);
        const Group world = manager.world();
        const at::Tensor x = at::ones({4});
        world.all_reduce(x, ReduceOp::sum, {milliseconds::max(), {}});
        world.all_reduce(x, ReduceOp::sum, {std::chrono::hours(24 * 365 * 1000), {}});
        const Group pair = manager.group({1, 0}, {"", milliseconds::max()});
        pair.barrier();
        manager.create_process_groups(GroupPlan::of_mesh(Mesh({{"all", 2}})), true);
        return std::to_string(x[0].item<int>());
      },
      40s);
  for (const auto& end : ends) EXPECT_EQ(end.report, "4") << end.signal;
}

TEST(Survival, ThreadsRunOut) {
  if (kSanitized) GTEST_SKIP() << "sanitizers map more memory than there is";
  const auto ends = fork_ranks(
      1,
      [](const Launch&) -> std::string {
        allow_memory(400);
        int begun = 0;
        try {
          run_threads(2000, [&](DistributedManager&) { ++begun; });
        } catch (const Error& error) {
          return concat(begun, " ", error.what());
        }
        return "none";
      },
      40s);
  EXPECT_EQ(ends[0].signal, 0);
  EXPECT_EQ(ends[0].report.rfind("0 run_threads was asked for 2000 ranks", 0), 0u)
      << ends[0].report;
}

TEST(Survival, MemoryOfTheStoreRunsOut) {
  if (kSanitized) GTEST_SKIP() << "sanitizers map more memory than there is";
  const auto ends = fork_ranks(
      3,
      [](const Launch& launch) -> std::string {
        const auto meeting = Rendezvous::meet(launch, 20s);
        if (launch.rank == 0) allow_memory(100);
        meeting.store->add("met", 1);
        while (meeting.store->add("met", 0) < 3) std::this_thread::sleep_for(1ms);
        std::string said = "ok";
        if (launch.rank == 1) {
          // Without room for it, the store gives this rank up, and serves the others.
          try {
            meeting.store->set("large", std::vector<std::uint8_t>(128 << 20));
          } catch (const c10::Error&) {
            said = "refused";
          }
          return said;
        }
        const auto key = concat("of ", launch.rank);
        meeting.store->set(key, "x");
        meeting.store->wait({"of 0", "of 2"}, 20s);
        while (launch.rank == 0 && meeting.store->add("over", 0) == 0)
          std::this_thread::sleep_for(1ms);
        if (launch.rank == 2) meeting.store->add("over", 1);
        return said;
      },
      40s);
  EXPECT_EQ(ends[0].report, "ok") << ends[0].signal;
  EXPECT_EQ(ends[2].report, "ok") << ends[2].signal;
}

TEST(Survival, DescriptorsOfRankZeroRunOut) {
  // Rank 0 may open few files; strangers take what they can get; the ranks still meet, and rank 0
  // does not spin.
  const auto ends = fork_ranks(
      3,
      [](const Launch& launch) -> std::string {
        if (launch.rank == 2) {  // the stranger
          std::vector<detail::Socket> silent;
          for (int i = 0; i < 150; ++i) {
            try {
              silent.push_back(
                  detail::connect_to("127.0.0.1", launch.port, false, steady_clock::now() + 5s));
            } catch (const RendezvousError&) {
              break;
            }
          }
          std::this_thread::sleep_for(2s);
          return "";
        }
        Launch two = launch;
        two.world_size = two.local_size = 2;
        if (launch.rank == 0) {
          const rlimit few{48, 48};
          ::setrlimit(RLIMIT_NOFILE, &few);
        } else {
          std::this_thread::sleep_for(300ms);
        }
        const auto meeting = Rendezvous::meet(two, 20s);
        meeting.store->set(std::to_string(launch.rank), "x");
        meeting.store->wait({"0", "1"}, 10s);
        std::this_thread::sleep_for(1s);
        rusage all{};
        ::getrusage(RUSAGE_SELF, &all);
        if (meeting.server) meeting.server->set_linger(5s);
        meeting.connection->leave();
        return concat("met, ", all.ru_utime.tv_sec + all.ru_stime.tv_sec, " s of a core");
      },
      40s);
  EXPECT_EQ(ends[0].report, "met, 0 s of a core");
  EXPECT_EQ(ends[1].report.rfind("met", 0), 0u) << ends[1].report;
}

TEST(Survival, TooFewDescriptorsAreCalledByTheirName) {
  // All begin when all have been started: how fast they start does not matter.
  int started[2], begin[2];
  ASSERT_EQ(::pipe(started), 0);
  ASSERT_EQ(::pipe(begin), 0);
  const auto ends = fork_ranks(
      40,
      [&](const Launch& launch) -> std::string {
        char byte = 0;
        if (launch.rank != 0 &&
            (::write(started[1], &byte, 1) != 1 || ::read(begin[0], &byte, 1) != 1))
          return "no pipe";
        if (launch.rank == 0) {
          for (int others = 0; others < 39; ++others)
            if (::read(started[0], &byte, 1) != 1) return "no pipe";
          const rlimit few{32, 32};
          ::setrlimit(RLIMIT_NOFILE, &few);
          const std::string all(39, '\0');
          if (::write(begin[1], all.data(), all.size()) != 39) return "no pipe";
        }
        try {
          (void)Rendezvous::meet(launch, 3s);
        } catch (const RendezvousError& error) {
          return error.what();
        }
        return "met";
      },
      40s);
  for (const int end : {started[0], started[1], begin[0], begin[1]}) ::close(end);
  EXPECT_NE(ends[0].report.find("file descriptor"), std::string::npos) << ends[0].report;
  EXPECT_NE(ends[0].report.find("ulimit -n"), std::string::npos) << ends[0].report;
}

TEST(Survival, TheSoftLimitIsRaised) {
  const auto ends = fork_ranks(
      1,
      [](const Launch&) -> std::string {
        rlimit limit{};
        ::getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = 64;
        ::setrlimit(RLIMIT_NOFILE, &limit);
        const detail::StoreServer server(detail::listen_on("127.0.0.1", 0), 500, "");
        ::getrlimit(RLIMIT_NOFILE, &limit);
        return limit.rlim_cur >= std::min<rlim_t>(564, limit.rlim_max) ? "raised" : "as it was";
      },
      20s);
  EXPECT_EQ(ends[0].report, "raised");
}

}  // namespace
}  // namespace tessera
