#pragma once
// Groups made and closed, ranks that die, strangers at the door, for a while: descriptors, threads,
// memory and the store's keys return to where they were.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>

#include "../support/sanitized.h"
#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/detail/wire.h"

namespace tessera::testing {

/// TESSERA_SOAK_SECONDS, or `otherwise`.
inline std::chrono::milliseconds soak_time(int otherwise) {
  const char* set = std::getenv("TESSERA_SOAK_SECONDS");
  return std::chrono::seconds(std::max(1, set ? std::atoi(set) : otherwise));
}

/// Where the ranks of a soak are.
struct SoakPlace {
  /// The host of each rank.
  std::vector<int> host_of;
  /// Called by each rank before it does anything: goes to its host, and completes the launch.
  std::function<void(Launch&)> enter = [](Launch&) {};

  int ranks() const { return static_cast<int>(host_of.size()); }
  /// The ranks of a rank's host: a group in shared memory cannot have others.
  std::vector<int> beside(int rank) const {
    std::vector<int> all;
    for (int other = 0; other < ranks(); ++other)
      if (host_of[static_cast<std::size_t>(other)] == host_of[static_cast<std::size_t>(rank)])
        all.push_back(other);
    return all;
  }
};

inline int entries(const char* folder) {
  int n = 0;
  if (DIR* all = ::opendir(folder)) {
    while (::readdir(all)) ++n;
    ::closedir(all);
  }
  return n;
}

/// What libtorch keeps of the groups over Gloo that a round makes between hosts, two at most on a
/// rank: 120 bytes for each thread that ever ran or waited for a call (the two of each group among
/// them), and the name of every group in its flight recorder; 0.55 KiB a group, as its allocations
/// were counted. Groups in shared memory leave nothing.
constexpr long kept_by_libtorch_kib = 1;
/// AddressSanitizer holds back as much of what was freed.
constexpr long kept_by_sanitizer_kib = test::kSanitized ? 256 * 1024 : 0;

struct Usage {
  int descriptors = 0, threads = 0;
  long resident_kib = 0;
  std::int64_t keys = 0;
};

inline Usage usage(c10d::Store& store) {
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
inline void knock(const Launch& launch, std::mt19937& random) {
  using namespace std::chrono_literals;
  using std::chrono::steady_clock;
  try {
    const auto socket =
        detail::connect_to(launch.address, launch.port, false, steady_clock::now() + 1s);
    std::string bytes;
    const auto kind = random() % 4;
    if (kind > 0) bytes += detail::store_magic;
    if (kind == 2) bytes.append(random() % 3000, '\1');
    if (kind == 3) bytes.append(20000, 'x');
    detail::send_all(socket, bytes.data(), bytes.size(), steady_clock::now() + 1s);
  } catch (const RendezvousError&) {  // the queue is full: the store is busy with others
  }
}

/// Every rank of a job that lives for the whole time: groups of all kinds, again and again. Begins
/// with "ok" if everything has returned, and has the figures in any case.
inline std::string live(const SoakPlace& place, Launch launch, std::chrono::milliseconds time) {
  using namespace std::chrono_literals;
  using std::chrono::steady_clock;
  at::set_num_threads(1);
  place.enter(launch);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = 30s;
  auto manager = DistributedManager::initialize(options);
  const auto store = manager.state()->base().store->clone();
  const std::vector<int> beside = place.beside(launch.rank);
  std::mt19937 random(7), stranger(static_cast<unsigned>(launch.rank));
  const auto round = [&](int n) {
    const Group world = manager.world();
    std::vector<int> some = world.ranks();
    std::shuffle(some.begin(), some.end(), random);  // the same on every rank
    some.resize(2);
    if (std::ranges::find(some, launch.rank) != some.end()) manager.group(some).barrier();
    const auto mesh = manager.mesh({{"all", launch.world_size}});
    const at::Tensor x = at::full({100}, launch.rank);
    mesh.group("all").all_reduce(x);
    manager.create_process_groups(
        GroupPlan::of_mesh(Mesh({{concat("axis ", n % 3), launch.world_size}})), true);
    if (n % 3 == 1) manager.group(world.ranks(), {"", 5s}).barrier();
    manager.group(beside, {"shm", 5s}).started().all_reduce(x).wait();
    for (int i = 0; i < 3; ++i) knock(launch, stranger);
    world.barrier();
    manager.shutdown();
  };
  // Everybody has closed its groups and nobody makes new ones while somebody counts.
  const auto counted = [&](const std::string& when, const Usage* most) {
    const auto all = [&](const std::string& what) {
      const std::string key = concat(when, what);
      if (store->add(key, 1) == launch.world_size) store->set(key + " all", "1");
      store->wait({key + " all"});
    };
    // There before anybody counts, or a rank that is through with it adds one for the others.
    store->add(concat(when, " counted"), 0);
    all(" closed");
    // What Gloo and the store close, they close in their time.
    const auto end = steady_clock::now() + 10s;
    Usage now;
    do {
      std::this_thread::sleep_for(200ms);
      now = usage(*store);
    } while (most && (now.descriptors > most->descriptors || now.threads > most->threads) &&
             steady_clock::now() < end);
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
  const Usage before = counted("before", nullptr);
  const auto begin = steady_clock::now();
  auto said = begin;
  while (go_on(n, steady_clock::now() < begin + time)) {
    round(n++);
    if (launch.rank > 0 || steady_clock::now() < said + 60s) continue;
    said = steady_clock::now();
    const Usage now = usage(*store);
    std::printf(
        "%ld s, %d rounds: %d descriptors, %d threads, %ld KiB, %ld keys\n",
        static_cast<long>(std::chrono::duration_cast<std::chrono::seconds>(said - begin).count()),
        n, now.descriptors, now.threads, now.resident_kib, static_cast<long>(now.keys));
    std::fflush(stdout);
  }
  const Usage after = counted("after", &before);
  bool ok = true;
  const auto compared = [&](const char* what, std::int64_t then, std::int64_t now,
                            std::int64_t room) {
    ok = ok && now <= then + room;
    return concat(what, " ", then, " -> ", now, now <= then + room ? "; " : " (too many); ");
  };
  const std::string figures =
      compared("descriptors", before.descriptors, after.descriptors, 0) +
      compared("threads", before.threads, after.threads, 0) +
      compared("keys", before.keys, after.keys, 4) +  // of the second counting itself
      compared("resident KiB", before.resident_kib, after.resident_kib,
               16 * 1024 + n * kept_by_libtorch_kib + kept_by_sanitizer_kib);
  return concat(ok ? "ok" : "grown", " after ", n, " rounds: ", figures);
}

/// One job after the other, each rank in a process of its own; in each, one rank dies in another
/// way, and all others hear of it. Returns how many jobs there were; failures are GoogleTest's.
inline int die(const SoakPlace& place, std::chrono::milliseconds time) {
  using namespace std::chrono_literals;
  const auto end = std::chrono::steady_clock::now() + time;
  std::mt19937 random(3);
  int jobs = 0;
  do {
    const int victim = static_cast<int>(random() % static_cast<unsigned>(place.ranks()));
    const int way = static_cast<int>(random() % 3);
    const auto ends = fork_ranks(
        place.ranks(),
        [&](Launch launch) -> std::string {
          at::set_num_threads(1);
          place.enter(launch);
          ManagerOptions options;
          options.launch = launch;
          options.timeout = 30s;
          // Rank 0 may die before the others have heard that all are in: over several hosts they
          // then look for a store that may yet come, for so long.
          options.rendezvous_timeout = 10s;
          try {
            auto manager = DistributedManager::initialize(options);
            if (launch.rank == victim && way == 0) ::raise(SIGKILL);
            const Group world = manager.world();
            if (launch.rank == victim && way == 1) ::raise(SIGKILL);
            if (launch.rank == victim) world.abort("enough");
            for (;;) world.barrier();
          } catch (const PeerLostError&) {
            return "lost";
          } catch (const RendezvousError&) {
            return "lost";
          }
        },
        40s);
    for (int rank = 0; rank < place.ranks(); ++rank) {
      const auto& e = ends[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(e.ended) << "rank " << rank << ", way " << way << ", victim " << victim;
      if (rank != victim || way == 2) {
        EXPECT_EQ(e.report, "lost") << "rank " << rank << ", way " << way << ", victim " << victim;
      }
    }
    ++jobs;
  } while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure());
  return jobs;
}

}  // namespace tessera::testing
