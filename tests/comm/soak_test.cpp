// Groups made and closed, ranks that come and go, strangers at the door, for a while: descriptors,
// threads, memory and the store's keys return to where they were. TESSERA_SOAK_SECONDS sets how
// long (5 by default; `TESSERA_SOAK_SECONDS=7200 build/release/bin/test_comm_faults
// --gtest_filter='Soak.*'` for two hours).

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/detail/wire.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

milliseconds soak_time() {
  const char* set = std::getenv("TESSERA_SOAK_SECONDS");
  const int seconds = set ? std::atoi(set) : 5;
  return std::chrono::seconds(std::max(1, seconds));
}

int entries(const char* folder) {
  int n = 0;
  if (DIR* all = ::opendir(folder)) {
    while (::readdir(all)) ++n;
    ::closedir(all);
  }
  return n;
}

struct Usage {
  int descriptors = 0, threads = 0;
  long resident_kib = 0;
  std::int64_t keys = 0;
};

Usage usage(c10d::Store& store) {
  Usage now;
  now.descriptors = entries("/proc/self/fd");
  now.threads = entries("/proc/self/task");
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("VmRSS:", 0) == 0) now.resident_kib = std::atol(line.c_str() + 6);
  now.keys = store.getNumKeys();
  return now;
}

/// What a stranger may say: nothing, nonsense, half a hello, too much.
void knock(int port, std::mt19937& random) {
  try {
    const auto socket = detail::connect_to("127.0.0.1", port, false, steady_clock::now() + 1s);
    std::string bytes;
    const auto kind = random() % 4;
    if (kind > 0) bytes += detail::store_magic;
    if (kind == 2) bytes.append(random() % 3000, '\1');
    if (kind == 3) bytes.append(20000, 'x');
    detail::send_all(socket, bytes.data(), bytes.size(), steady_clock::now() + 1s);
  } catch (const RendezvousError&) {  // the queue is full: the store is busy with others
  }
}

/// Every rank of a job that lives for the whole time: groups of all kinds, again and again.
std::string live(const Launch& launch, milliseconds time) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = 30s;
  auto manager = DistributedManager::initialize(options);
  const auto store = manager.state()->base().store->clone();
  std::mt19937 random(7), stranger(static_cast<unsigned>(launch.rank));
  const auto round = [&](int n) {
    const Group world = manager.world();
    std::vector<int> some{0, 1, 2};
    std::shuffle(some.begin(), some.end(), random);  // the same on every rank
    some.resize(2);
    if (std::find(some.begin(), some.end(), launch.rank) != some.end())
      manager.group(some).barrier();
    const auto mesh = manager.mesh({{"all", launch.world_size}});
    const at::Tensor x = at::full({100}, launch.rank);
    mesh.group("all").all_reduce(x);
    manager.create_process_groups(
        GroupPlan::of_mesh(Mesh({{concat("axis ", n % 3), launch.world_size}})), true);
    if (n % 3 == 1) manager.group({0, 1, 2}, {"", 5s}).barrier();
    manager.group({0, 1, 2}, {"shm", 5s}).start().all_reduce(x).wait();
    for (int i = 0; i < 3; ++i) knock(launch.port, stranger);
    world.barrier();
    manager.shutdown();
  };
  // Everybody has closed its groups and nobody makes new ones while somebody counts.
  const auto counted = [&](const std::string& when) {
    const auto all = [&](const std::string& what) {
      const std::string key = concat(when, what);
      if (store->add(key, 1) == launch.world_size) store->set(key + " all", "1");
      store->wait({key + " all"});
    };
    // There before anybody counts, or a rank that is through with it adds one for the others.
    store->add(concat(when, " counted"), 0);
    all(" closed");
    std::this_thread::sleep_for(200ms);  // what Gloo and the store close, they close in their time
    const Usage now = usage(*store);
    all(" counted");
    return now;
  };
  const auto go_on = [&](int n, bool wanted) {  // rank 0 decides for all
    const std::string key = concat("go on ", n);
    if (launch.rank == 0) store->set(key, wanted ? "1" : "0");
    const bool on = store->get_to_str(key) == "1";
    if (store->add(key + " read", 1) == launch.world_size) {
      store->deleteKey(key);
      store->deleteKey(key + " read");
    }
    return on;
  };
  int n = 0;
  for (; n < 6; ++n) round(n);
  const Usage before = counted("before");
  const auto end = steady_clock::now() + time;
  while (go_on(n, steady_clock::now() < end)) round(n++);
  const Usage after = counted("after");
  std::string wrong;
  const auto expect = [&](const char* what, std::int64_t then, std::int64_t now,
                          std::int64_t room) {
    if (now > then + room) wrong += concat(what, " ", then, " -> ", now, "; ");
  };
  expect("descriptors", before.descriptors, after.descriptors, 0);
  expect("threads", before.threads, after.threads, 0);
  expect("keys", before.keys, after.keys, 4);  // of the second counting itself
  expect("resident KiB", before.resident_kib, after.resident_kib, 16 * 1024);
  if (wrong.empty()) return concat("ok after ", n, " rounds");
  return concat("after ", n, " rounds: ", wrong);
}

TEST(Soak, GroupsAndStrangersLeaveNothingBehind) {
  const auto time = soak_time();
  const auto ends =
      testing::fork_ranks(3, [&](const Launch& launch) { return live(launch, time); }, time + 60s);
  for (const auto& end : ends) {
    EXPECT_TRUE(end.ended) << "hung";
    EXPECT_EQ(end.report.rfind("ok after", 0), 0u) << end.report << " signal " << end.signal;
  }
}

/// One job after the other in one process each, on one port; in each, one rank dies in another way.
TEST(Soak, RanksThatDieEndTheirJobAndNoOther) {
  const auto end = steady_clock::now() + soak_time() / 2;
  std::mt19937 random(3);
  int jobs = 0;
  do {
    const int victim = static_cast<int>(random() % 3), way = static_cast<int>(random() % 3);
    const auto ends = testing::fork_ranks(
        3,
        [&](const Launch& launch) -> std::string {
          at::set_num_threads(1);
          ManagerOptions options;
          options.launch = launch;
          options.timeout = 30s;
          try {
            auto manager = DistributedManager::initialize(options);
            if (launch.rank == victim && way == 0) ::raise(SIGKILL);
            const Group world = manager.world();
            if (launch.rank == victim && way == 1) ::raise(SIGKILL);
            if (launch.rank == victim) world.abort("enough");
            for (;;) world.barrier();
          } catch (const PeerLostError&) {
            return "lost";
          } catch (const RendezvousError&) {  // rank 0 died before the others heard that all are in
            return "lost";
          }
        },
        40s);
    for (int rank = 0; rank < 3; ++rank) {
      const auto& e = ends[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(e.ended) << "rank " << rank << ", way " << way << ", victim " << victim;
      if (rank != victim || way == 2) {
        EXPECT_EQ(e.report, "lost") << "way " << way;
      }
    }
    ++jobs;
  } while (steady_clock::now() < end && !::testing::Test::HasFailure());
  EXPECT_GT(jobs, 0);
}

}  // namespace
}  // namespace tessera
