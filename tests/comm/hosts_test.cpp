// Groups over several hosts of whose ranks some share one: how they meet, and the choice of the
// backend. What they compute: on_hosts_test.cpp; faults: faults_test.cpp.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "on_hosts.h"
#include "tessera/comm/backends/hosts/host_map.h"
#include "tessera/comm/backends/hosts/hosts.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/store_meeting.h"
#include "tessera/comm/job/threads.h"

namespace tessera::hosts_test {
namespace {

using namespace std::chrono_literals;
using testing::run_on_hosts;
using torch::Tensor;

TEST(HostMap, RanksOfAHostNeedNotBeNeighbours) {
  const auto map = detail::HostMap::of({"b", "a", "b", "c", "a"});
  EXPECT_EQ(map.hosts, (std::vector<std::vector<int>>{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(map.host_of, (std::vector<int>{0, 1, 0, 2, 1}));
  EXPECT_EQ(map.place_of, (std::vector<int>{0, 0, 1, 0, 1}));
  EXPECT_FALSE(map.in_order);
  EXPECT_TRUE(detail::HostMap::of({"b", "b", "a"}).in_order);
}

// The names that the ranks that come get, "" for one that gives up.
std::vector<std::string> names_of_life(c10d::Store& store, int size, const std::vector<int>& come,
                                       std::chrono::milliseconds limit) {
  std::vector<std::string> names(come.size());
  std::vector<std::thread> ranks;
  for (std::size_t i = 0; i < come.size(); ++i)
    ranks.emplace_back([&, i] {
      try {
        names[i] = detail::name_of_life(store, come[i], size, limit);
      } catch (const std::exception&) {
      }
    });
  for (auto& rank : ranks) rank.join();
  return names;
}

// Of some lives not all ranks come: what those leave at the store misleads nobody.
TEST(StoreMeeting, EveryLifeHasANameOfItsOwn) {
  std::set<std::string> known;
  for (const std::vector<int>& come_first : {std::vector<int>{0}, {1, 2}, {0, 2}, {0, 1, 2}}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (int life = 0; life < 3; ++life) {
      names_of_life(*store, 3, come_first, come_first.size() == 3 ? 30s : 0s);
      for (const int size : {3, 2, 1}) {
        std::vector<int> all(static_cast<std::size_t>(size));
        std::iota(all.begin(), all.end(), 0);
        const auto names = names_of_life(*store, size, all, 30s);
        EXPECT_EQ(names, std::vector<std::string>(names.size(), names[0]));
        EXPECT_FALSE(names[0].empty());
        EXPECT_TRUE(known.insert(names[0]).second) << names[0];
      }
    }
  }
}

// What all ranks read does not grow with the square of their number where most say the same.
TEST(StoreMeeting, TextsAreGatheredOnce) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = 300;
  std::vector<std::string> texts;
  for (int r = 0; r < size; ++r)
    texts.push_back(r == 7     ? ""
                    : r == 250 ? std::string("zero \0 and more", 15)
                               : concat("the mark of host ", r / 100, std::string(100, 'x')));
  for (int r = 1; r < size; ++r)
    store->set(concat("k/of rank ", r),
               std::vector<std::uint8_t>(texts[r].begin(), texts[r].end()));
  EXPECT_EQ(detail::gather_at_store(*store, "k", 0, size, texts[0], 30s), texts);
  EXPECT_EQ(detail::gather_at_store(*store, "k", 299, size, texts[299], 30s), texts);
  EXPECT_LT(store->get("k/of all").size(), 1000U);
  // What is not ours is refused, never read past its end.
  for (const std::size_t bytes : {0, 7, 8, 20, 300}) {
    auto part = store->get("k/of all");
    part.resize(bytes);
    store->set("other/of all", part);
    EXPECT_THROW(detail::gather_at_store(*store, "other", 1, size, "", 30s), Error) << bytes;
  }
}

TEST(Hosts, TheBackendFollowsFromWhereTheRanksAre) {
  const auto over = [](const std::vector<int>& hosts) {
    std::map<std::string, int> seen;
    std::mutex mutex;
    run_on_hosts(hosts, [&](DistributedManager& manager) {
      const auto world = manager.world();
      world.barrier();
      EXPECT_FALSE(world.backend_reason().empty());
      const std::lock_guard lock(mutex);
      ++seen[world.backend() + ": " + world.backend_reason()];
    });
    EXPECT_EQ(seen.size(), 1U) << "all ranks say the same";
    return seen.empty() ? std::string() : seen.begin()->first;
  };
  EXPECT_EQ(over({0, 0, 0}), "shm: its 3 ranks share the memory of a host");
  EXPECT_EQ(over({0, 1, 2}),
            "gloo: no two of its ranks share memory: ranks 0 and 1 are on different hosts");
  EXPECT_EQ(over({0, 1, 1}),
            "hosts: its 3 ranks are on 2 hosts: memory inside a host, gloo between the hosts "
            "(ranks 0 and 1 are on different hosts)");
}

TEST(Hosts, EachGroupHasTheBackendOfItsOwnRanks) {
  run_on_hosts({0, 0, 1}, [](DistributedManager& manager) {
    EXPECT_EQ(manager.world().backend(), "hosts");
    const int me = manager.rank();
    if (me != 2) {
      EXPECT_EQ(manager.group({1, 0}).backend(), "shm");
    }
    if (me != 1) {
      EXPECT_EQ(manager.group({0, 2}).backend(), "gloo");
    }
    EXPECT_EQ(manager.group({me}).backend(), "self");
    GroupOptions named;
    named.backend = "gloo";
    const auto asked = manager.group({0, 1, 2}, named);
    EXPECT_EQ(asked.backend(), "gloo");
    EXPECT_EQ(asked.backend_reason(), "");
    asked.barrier();
  });
}

TEST(Hosts, OfThreadsAndOfOneRank) {
  ManagerOptions options;
  options.backend = "auto";
  run_threads(
      2, [](DistributedManager& manager) { EXPECT_EQ(manager.world().backend(), "shm"); }, options);
  run_threads(
      1, [](DistributedManager& manager) { EXPECT_EQ(manager.world().backend(), "self"); },
      options);
}

TEST(Hosts, ProcessesOfOneHostUseMemoryUnlessTheProgramNamesABackend) {
  const auto ends = testing::fork_ranks(
      2,
      [](const Launch& launch) {
        auto manager = DistributedManager::initialize({.timeout = 30s, .launch = launch});
        manager.world().barrier();
        return manager.world().backend();
      },
      30s);
  for (const auto& end : ends) EXPECT_EQ(end.report, "shm");
}

// Ranks that meet and cannot share memory use Gloo, and say why.
TEST(Hosts, WithoutMemoryForItRanksOfOneHostUseGloo) {
  const auto ends = testing::fork_ranks(
      3,
      [](const Launch& launch) {
        const rlimit small{65536, 65536};
        if (launch.rank == 0) ::setrlimit(RLIMIT_FSIZE, &small);
        ManagerOptions options;
        options.timeout = 30s;
        options.launch = launch;
        options.backend = "auto";
        auto manager = DistributedManager::initialize(options);
        const auto world = manager.world();
        auto t = torch::ones({5});
        world.all_reduce(t);
        return concat(world.backend(), " ", t[0].item<double>(), " ", world.backend_reason());
      },
      40s);
  for (const auto& end : ends) {
    EXPECT_EQ(end.report.rfind("gloo 3 ", 0), 0U) << end.report;
    EXPECT_NE(end.report.find("ulimit -f"), std::string::npos) << end.report;
  }
}

/// The backend of each rank, made without a group around it; rank r is on host `hosts[r]`.
void run_chosen(const std::vector<int>& hosts, const std::function<void(int, HostsOptions&)>& set,
                const std::function<void(const std::string&)>& body,
                const c10::intrusive_ptr<c10d::Store>& store) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
    threads.emplace_back([&, rank] {
      HostsOptions options;
      options.name = "chosen";
      options.timeout = 60s;
      for (int r = 0; r < static_cast<int>(hosts.size()); ++r) options.ranks.push_back(r);
      options.address = "127.0.0.1";
      options.host = concat("host ", hosts[static_cast<std::size_t>(rank)]);
      set(rank, options);
      try {
        const auto chosen =
            make_transport_by_host(store, rank, static_cast<int>(hosts.size()), options);
        std::vector<Tensor> t{torch::full({3}, rank + 1.0)};
        c10d::AllreduceOptions average;
        average.reduceOp = c10d::ReduceOp::AVG;
        chosen.transport->backend()->allreduce(t, average)->wait();
        EXPECT_EQ(t[0][2].item<double>(), (static_cast<double>(hosts.size()) + 1) / 2);
        body(concat(chosen.name, ": ", chosen.reason));
      } catch (const std::exception& error) {
        body(error.what());
      }
    });
  for (auto& thread : threads) thread.join();
}

// Ranks of one boot: a line of their marks says what is between them.
TEST(Hosts, RanksOfOneHostThatAreApartSayByWhat) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"boot\n4:2\n1000", "are in different network namespaces (containers) of one host"},
      {"boot\n4:1\n1001", "belong to different users, 1000 and 1001"}};
  for (const auto& one : cases) {
    std::mutex mutex;
    std::set<std::string> said;
    run_chosen(
        {0, 1},
        [&](int rank, HostsOptions& options) {
          options.plain = false;
          options.host = rank == 0 ? "boot\n4:1\n1000" : one.first;
        },
        [&](const std::string& text) {
          const std::lock_guard lock(mutex);
          said.insert(text);
        },
        c10::make_intrusive<c10d::HashStore>());
    EXPECT_EQ(said, std::set<std::string>{concat("hosts: no two of its ranks share memory: gloo "
                                                 "between them (ranks 0 and 1 ",
                                                 one.second, ")")});
  }
}

// As c10d uses it: no group completes what Gloo lacks, and the address is asked for if it is used.
TEST(Hosts, WithoutAGroupAroundItTheBackendDoesWhatGlooLacks) {
  for (const auto& hosts : {std::vector<int>{0, 1}, std::vector<int>{0, 0, 1}}) {
    std::atomic<int> asked{0};
    std::mutex mutex;
    std::map<std::string, int> said;
    run_chosen(
        hosts,
        [&](int, HostsOptions& options) {
          options.plain = false;
          options.ranks.clear();
          options.address = "";
          options.find_address = [&] {
            ++asked;
            return std::string("127.0.0.1");
          };
        },
        [&](const std::string& text) {
          const std::lock_guard lock(mutex);
          ++said[text];
        },
        c10::make_intrusive<c10d::HashStore>());
    EXPECT_EQ(asked, static_cast<int>(hosts.size()));
    ASSERT_EQ(said.size(), 1U) << "all ranks say the same: " << said.begin()->first;
    EXPECT_EQ(said.begin()->first,
              hosts.size() == 2
                  ? "hosts: no two of its ranks share memory: gloo between them (ranks 0 and 1 are "
                    "on different hosts)"
                  : "hosts: its 3 ranks are on 2 hosts: memory inside a host, gloo between the "
                    "hosts (ranks 0 and 2 are on different hosts)");
  }
}

// Where no two ranks share memory, all messages come through the network.
TEST(Hosts, RanksThatShareNoHostReceiveFromAnyRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      HostsOptions options;
      options.name = "any";
      options.timeout = 60s;
      options.address = "127.0.0.1";
      options.host = concat("host ", rank);
      options.plain = false;
      try {
        const auto chosen = make_transport_by_host(store, rank, 2, options);
        const auto backend = chosen.transport->backend();
        EXPECT_EQ(chosen.name, "hosts");
        std::vector<Tensor> word{torch::full({4}, 5.0 * rank)};
        if (rank == 1) backend->send(word, 0, 9)->wait();
        if (rank == 0) {
          const auto work = backend->recvAnysource(word, 9);
          work->wait();
          EXPECT_EQ(work->sourceRank(), 1);
          EXPECT_EQ(word[0][3].item<double>(), 5.0);
        }
        backend->barrier(c10d::BarrierOptions())->wait();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

// One rank asks for MPI, which none has: all are told.
TEST(Hosts, MpiBetweenHostsIsRefusedOnAllRanksWhereOneHasNone) {
  std::atomic<int> told{0};
  run_chosen(
      {0, 1, 1},
      [](int rank, HostsOptions& options) { options.between = rank == 1 ? "mpi" : "auto"; },
      [&](const std::string& text) {
        EXPECT_NE(text.find("over MPI between hosts: not on rank 0: it"), std::string::npos)
            << text;
        ++told;
      },
      c10::make_intrusive<c10d::HashStore>());
  EXPECT_EQ(told, 3);
  EXPECT_THROW(DistributedManager::initialize({.between_hosts = "tcp"}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::hosts_test
