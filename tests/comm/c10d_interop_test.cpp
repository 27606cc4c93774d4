// Managers over groups and stores of c10d's that the program has made: stock Gloo, of which the
// library has seen nothing.

#include "tessera/comm/job/c10d_interop.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "../support/stock_gloo.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/store/store.h"

namespace tessera::c10d_interop_test {
namespace {

using namespace std::chrono_literals;
using test::stock_gloo;
using test::stock_group;
using test::StorePtr;

// Each rank on a thread of its own.
void on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

at::Tensor filled(std::int64_t size, double value) { return at::full({size}, value, at::kDouble); }

// Every kind of call, with uneven counts: rank r holds r + 1 elements, all of value r.
void use(const Group& group) {
  const int me = group.rank(), n = group.size();
  std::vector<std::int64_t> counts;
  std::vector<at::Tensor> parts;
  for (int r = 0; r < n; ++r) {
    counts.push_back(r + 1);
    parts.push_back(filled(r + 1, r));
  }
  const at::Tensor mine = filled(me + 1, me), whole = at::cat(parts);
  at::Tensor all = at::empty_like(whole), part = at::empty_like(mine);
  group.all_gather(all, mine, counts);
  EXPECT_TRUE(at::equal(all, whole));
  at::Tensor sum = filled(4, me);
  group.all_reduce(sum);
  EXPECT_TRUE(at::equal(sum, filled(4, n * (n - 1) / 2.0)));
  at::Tensor first = filled(3, me);
  group.broadcast(first, n - 1);
  EXPECT_TRUE(at::equal(first, filled(3, n - 1)));
  group.reduce_scatter(part, whole, ReduceOp::sum, counts);
  EXPECT_TRUE(at::equal(part, mine * n));
  if (n < 2) return;
  at::Tensor got = filled(2, -1);
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  group.exchange(
      {{Message::Kind::send, filled(2, me), next}, {Message::Kind::receive, got, before}});
  EXPECT_TRUE(at::equal(got, filled(2, before)));
  group.barrier();
}

}  // namespace

TEST(C10dInterop, AGroupOfTheProgramIsTheWorldAndStaysThePrograms) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(3, [&](int rank) {
    const auto group = stock_group(store, rank, 3);
    const auto limit = group->getStore()->getTimeout();
    for (const char* backend : {"auto", "gloo", "c10d"}) {
      auto manager = manager_of({.group = group}, {.backend = backend, .timeout = 20s});
      EXPECT_EQ(manager.rank(), rank);
      EXPECT_EQ(manager.world_size(), 3);
      EXPECT_EQ(manager.local_rank(), rank);
      EXPECT_EQ(manager.launch().ranks_per_host, std::vector<int>{3});
      use(manager.world());
      if (std::string(backend) == "c10d") {
        EXPECT_EQ(manager.world().backend(c10::DeviceType::CPU), "gloo");
        EXPECT_THROW(manager.group({2, 1, 0}), InvalidArgument);
        if (rank < 2) {
          EXPECT_THROW(manager.group({0, 1}), InvalidArgument);
          use(manager.group({1, 0}, {.backend = "gloo"}));
        }
        ProcessGroupConfig config;
        config.add_node({.name = "data", .size = 3}, "world");
        manager.create_process_groups(config);
        use(manager.group("data"));
      } else {
        use(manager.mesh(Mesh({{"data", 3}}, {2, 0, 1})).group("data"));
        use(manager.group({rank}));
      }
    }
    EXPECT_EQ(group->getStore()->getTimeout(), limit);
    std::vector<at::Tensor> value{filled(2, rank)};
    group->allreduce(value)->wait();
    EXPECT_TRUE(at::equal(value[0], filled(2, 3)));
  });
}

TEST(C10dInterop, SeveralManagersOfOneStore) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(2, [&](int rank) {
    const C10dRanks ranks{.store = store, .rank = rank, .size = 2};
    const ManagerOptions options{.backend = "gloo", .timeout = 20s};
    {
      const auto a = manager_of(ranks, options), b = manager_of(ranks, options);
      use(b.world());
      use(a.world());
    }
    use(manager_of(ranks, options).world());
  });
  // What they met by is gone: how often each of the two has called is left.
  EXPECT_EQ(store->getNumKeys(), 2);
}

TEST(C10dInterop, BackendsOfTheProgramsOwnByName) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> made{0};
  on_ranks(4, [&](int rank) {
    const C10dRanks ranks{
        .store = store,
        .rank = rank,
        .size = 4,
        .backends = {{"mine",
                      [&](const StorePtr& own, int me, int size, std::chrono::milliseconds limit) {
                        ++made;
                        return stock_gloo(own, me, size, limit);
                      }},
                     {"none", [](const StorePtr&, int, int, std::chrono::milliseconds) {
                        return c10::intrusive_ptr<c10d::Backend>();
                      }}}};
    const auto manager = manager_of(ranks, {.backend = "mine", .timeout = 20s});
    const auto mesh = manager.mesh({{"data", 2}, {"model", 2}});
    use(manager.world());
    use(mesh.group("data"));
    use(mesh.group("model"));
    use(manager.group({3, 1, 0, 2}, {.backend = "gloo"}));
    EXPECT_THROW(manager.group({0, 1, 2, 3}, {.backend = "none"}), InvalidArgument);
    EXPECT_THROW(manager.group({0, 1, 2, 3}, {.backend = "other"}), InvalidArgument);
  });
  EXPECT_EQ(made, 12);
}

// The given group has no way to end a call: its waits are the library's, and end as ever.
TEST(C10dInterop, ARankThatThrowsEndsTheCallsOnAGivenGroup) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(3, [&](int rank) {
    const auto group = stock_group(store, rank, 3);
    const auto began = std::chrono::steady_clock::now();
    try {
      const auto manager = manager_of({.group = group}, {.backend = "c10d", .timeout = 20s});
      use(manager.world());
      if (rank == 1) throw Error("a rank alone");
      at::Tensor sum = filled(4, rank);
      manager.world().all_reduce(sum);
      ADD_FAILURE() << "reduced";
    } catch (const PeerLostError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.what();
    } catch (const Error& error) {
      EXPECT_EQ(rank, 1) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, 10s);
  });
}

TEST(C10dInterop, SaysWhatIsWrong) {
  const auto said = [](const C10dRanks& ranks, const ManagerOptions& options = {}) {
    try {
      manager_of(ranks, options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 1);
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(said({}), "neither a process group nor a store");
  expect(said({.group = c10::make_intrusive<c10d::ProcessGroup>(0, 1)}), "without a store");
  expect(said({.group = group, .rank = 1, .size = 2}), "give the group alone");
  expect(said({.store = store}), "rank 0 of 0");
  expect(said({.store = store, .rank = 2, .size = 2}), "rank 2 of 2");
  expect(said({.group = group}, {.launch = Launch{}}), "given a launch");
  expect(said({.group = group}, {.between_hosts = "mpi"}), "given a launch or MPI");
  expect(said({.group = group}, {.backend = "mpi"}), "choose one of");
  expect(said({.store = store, .size = 1}, {.backend = "c10d"}), "choose one of");
  expect(said({.group = group, .backends = {{"shm", stock_gloo}}}), "another one");
  expect(said({.group = group, .backends = {{"mine", nullptr}}}), "without a function");
  use(manager_of({.group = group}).world());
}

TEST(C10dInterop, ARankThatDoesNotComeIsNamed) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(3, [&](int rank) {
    if (rank == 2) return;
    try {
      manager_of({.store = store, .rank = rank, .size = 3}, {.rendezvous_timeout = 1500ms});
      ADD_FAILURE() << "met";
    } catch (const RendezvousError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{rank == 0 ? 2 : 0}) << error.what();
    }
  });
}

}  // namespace tessera::c10d_interop_test
