// What only ranks that share memory must show: that errors say why they cannot, that calls that no
// thread waits for continue, and that results have the same bits everywhere. Values and faults: the
// tests of all backends.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/shared_memory.h"
#include "tessera/comm/job/threads.h"

namespace tessera::shm_test {
namespace {

using namespace std::chrono_literals;

ManagerOptions over_shm() {
  ManagerOptions options;
  options.backend = "shm";
  options.timeout = 60s;
  return options;
}

/// Ranks as threads, each with a backend that no group stands around, as plain c10d uses it.
void with_backends(int ranks,
                   const std::function<void(const c10::intrusive_ptr<c10d::Backend>&)>& body) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(make_shm_transport(store, rank, ranks, {.timeout = 30s})->backend());
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

TEST(Shm, RefusalsAreOnAllRanksAndSayWhy) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> told{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      shm::Directory directory;
      directory.put = [&](const std::string& key, const std::string& bytes) {
        store->set(key, std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
      };
      // Rank 1 looks for a socket that is not there, as on another host.
      directory.get = [&](const std::string& key, std::chrono::milliseconds limit) {
        store->wait({key}, limit);
        const auto bytes = store->get(key);
        std::string text(bytes.begin(), bytes.end());
        if (rank == 1) text[10] = static_cast<char>(text[10] ^ 1);
        return text;
      };
      try {
        make_shm_transport(directory, rank, 2, {.timeout = 20s});
      } catch (const NotAvailable& error) {
        const std::string what = error.what();
        EXPECT_NE(what.find("on another host"), std::string::npos) << what;
        EXPECT_NE(what.find("choose another backend"), std::string::npos) << what;
        ++told;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(told, 2);
}

// Rank 1 can only go on if the other rank's share of the call is done while that waits elsewhere.
TEST(Shm, StartedCallsGoOnWhileNobodyWaitsForThem) {
  run_threads(
      2,
      [](DistributedManager& manager) {
        const auto world = manager.world(), other = manager.group({1, 0});
        for (const std::int64_t n : {std::int64_t{10}, std::int64_t{1} << 20}) {
          const auto sum = torch::full({n}, 1.0 + world.rank());
          const auto moved = torch::zeros({n});
          if (world.rank() == 0) {
            auto reduce = world.started().all_reduce(sum);
            auto send = world.started().send(torch::ones({n}), 1);
            other.barrier();
            send.wait();
            reduce.wait();
          } else {
            world.all_reduce(sum);
            world.receive(moved, 0);
            other.barrier();
            EXPECT_TRUE(torch::equal(moved, torch::ones({n})));
          }
          EXPECT_TRUE(torch::equal(sum, torch::full({n}, 3.0)));
        }
      },
      over_shm());
}

TEST(Shm, FuturesAreCompletedWhileNobodyWaits) {
  with_backends(2, [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    for (const std::int64_t n : {std::int64_t{3}, std::int64_t{300000}}) {
      std::vector<at::Tensor> tensors{torch::full({n}, 1.0 + backend->getRank())};
      auto work = backend->allreduce(tensors);
      std::atomic<bool> called{false};
      const auto future = work->getFuture();
      future->addCallback([&](c10::ivalue::Future&) { called = true; });
      work.reset();  // it goes on all the same
      future->waitAndThrow();
      EXPECT_EQ(future->value().toTensorVector().front()[0].item<double>(), 3);
      while (!called) std::this_thread::yield();
    }
  });
}

TEST(Shm, ResultsOfAWorkAreWaitedFor) {
  with_backends(2, [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    for (const std::int64_t n : {std::int64_t{3}, std::int64_t{300000}}) {
      std::vector<at::Tensor> tensors{torch::full({n}, 1.0 + backend->getRank())};
      if (backend->getRank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const auto results = backend->allreduce(tensors)->result();
      EXPECT_EQ(results.at(0)[n - 1].item<double>(), 3);
    }
  });
}

TEST(Shm, PlainC10dCallsOfListsAndSeveralTensors) {
  with_backends(3, [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    const int n = 3, me = backend->getRank();
    using Tensors = std::vector<at::Tensor>;
    const auto of = [](int rank) { return torch::full({2, 2}, 10.0 * rank); };
    Tensors several{torch::full({5}, 1.0 * me), torch::full({70000}, 2.0 * me)};
    backend->allreduce_coalesced(several)->wait();
    EXPECT_EQ(several[0][4].item<double>(), 3);
    EXPECT_EQ(several[1][69999].item<double>(), 6);
    Tensors mine{of(me)};
    std::vector<Tensors> lists{{torch::zeros({2, 2}), torch::zeros({2, 2}), torch::zeros({2, 2})}};
    backend->allgather(lists, mine)->wait();
    for (int r = 0; r < n; ++r) EXPECT_TRUE(lists[0][r].equal(of(r)));
    Tensors in{of(3 * me), of(3 * me + 1), of(3 * me + 2)};
    Tensors out{torch::zeros({2, 2}), torch::zeros({2, 2}), torch::zeros({2, 2})};
    backend->alltoall(out, in)->wait();
    for (int r = 0; r < n; ++r) EXPECT_TRUE(out[r].equal(of(3 * r + me)));
    Tensors part{torch::zeros({2, 2})};
    std::vector<Tensors> inputs{in};
    backend->reduce_scatter(part, inputs)->wait();
    EXPECT_EQ(part[0][0][0].item<double>(), 10.0 * (9 + 3 * me));
    Tensors pair_out{torch::zeros({6}), torch::zeros({3})};
    Tensors pair_in{torch::full({2}, 1.0 * me), torch::full({1}, -1.0 * me)};
    backend->allgather_into_tensor_coalesced(pair_out, pair_in)->wait();
    EXPECT_EQ(pair_out[0][5].item<double>(), 2);
    EXPECT_EQ(pair_out[1][2].item<double>(), -2);
    if (me == 0) {
      double sum = 0;
      for (int i = 0; i < 2; ++i) {
        Tensors got{torch::zeros({2, 2})};
        const auto work = backend->recvAnysource(got, 7);
        work->wait();
        EXPECT_TRUE(got[0].equal(of(work->sourceRank())));
        sum += got[0][0][0].item<double>();
      }
      EXPECT_EQ(sum, 30);
    } else {
      Tensors sent{of(me)};
      backend->send(sent, 0, 7)->wait();
    }
    c10d::AllreduceOptions bits;
    bits.reduceOp = c10d::ReduceOp::BOR;
    Tensors mask{torch::full({2}, 1 << me, torch::kInt)};
    backend->allreduce(mask, bits)->wait();
    EXPECT_EQ(mask[0][1].item<int>(), 7);
    backend->barrier()->wait();
  });
}

// Without a group, a rank that gives up tells the others by itself.
TEST(Shm, AbortReachesTheOthers) {
  with_backends(2, [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    std::vector<at::Tensor> tensors{torch::ones({4})};
    backend->allreduce(tensors)->wait();
    if (backend->getRank() == 0) return backend->abort();
    EXPECT_THROW(backend->allreduce(tensors)->wait(), PeerLostError);
  });
}

TEST(Shm, AfterAShutdownTheOthersGoOn) {
  std::atomic<bool> ended{false};
  with_backends(3, [&](const c10::intrusive_ptr<c10d::Backend>& backend) {
    std::vector<at::Tensor> tensors{torch::ones({4})};
    backend->allreduce(tensors)->wait();
    const int me = backend->getRank();
    if (me == 0) {
      backend->shutdown();
      EXPECT_THROW(backend->allreduce(tensors)->wait(), PeerLostError);
      ended = true;
      return;
    }
    while (!ended) std::this_thread::yield();
    (me == 1 ? backend->send(tensors, 2, 0) : backend->recv(tensors, 1, 0))->wait();
    EXPECT_THROW(backend->allreduce(tensors)->wait(), PeerLostError);
  });
}

// A shutdown waits for what was begun, and what other threads begin meanwhile ends in any order.
TEST(Shm, CallsOfOtherThreadsDuringAShutdownHoldUpNoneOfThem) {
  std::atomic<int> ended{0};
  with_backends(2, [&](const c10::intrusive_ptr<c10d::Backend>& backend) {
    if (backend->getRank() == 1) {
      std::this_thread::sleep_for(600ms);  // both threads wait
      std::vector<at::Tensor> sent{torch::ones({4})};
      for (const int tag : {2, 1}) {
        backend->send(sent, 0, tag)->wait();
        const auto limit = std::chrono::steady_clock::now() + 20s;
        while (ended < 3 - tag && std::chrono::steady_clock::now() < limit)
          std::this_thread::sleep_for(1ms);
        EXPECT_EQ(ended, 3 - tag);
      }
      backend->send(sent, 0, 0)->wait();
      return;
    }
    std::vector<at::Tensor> first{torch::zeros({4})};
    const auto begun = backend->recv(first, 1, 0);
    std::vector<std::thread> threads;
    threads.emplace_back([&] { backend->shutdown(); });
    for (const int tag : {1, 2}) {
      std::this_thread::sleep_for(100ms);
      threads.emplace_back([&, tag] {
        std::vector<at::Tensor> got{torch::zeros({4})};
        try {
          backend->recv(got, 1, tag)->wait();
          EXPECT_TRUE(got[0].equal(torch::ones({4})));
          ++ended;
        } catch (const std::exception& error) {
          ADD_FAILURE() << "tag " << tag << ": " << error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(begun->isSuccess());
    EXPECT_TRUE(first[0].equal(torch::ones({4})));
  });
}

TEST(Shm, ResultsHaveTheSameBitsOnAllRanks) {
  for (int ranks = 2; ranks <= 4; ++ranks)
    run_threads(
        ranks,
        [](DistributedManager& manager) {
          const auto world = manager.world();
          auto random = at::detail::createCPUGenerator(77 + world.rank());
          for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble})
            for (const std::int64_t n : {1, 13, 1000, 5000, 40001, 300007}) {
              const auto mine = torch::randn({n}, random, torch::kDouble).to(dtype);
              auto t = mine.clone();
              world.all_reduce(t);
              // The reduction of single ranks in order is the same number, too.
              auto all = torch::empty({world.size(), n}, dtype);
              world.all_gather(all, mine.unsqueeze(0));
              auto want = all[0].to(dtype == torch::kBFloat16 ? torch::kFloat : dtype);
              for (int r = 1; r < world.size(); ++r) want = want + all[r].to(want.scalar_type());
              EXPECT_TRUE(torch::equal(t, want.to(dtype))) << c10::toString(dtype) << n;
            }
        },
        over_shm());
}

TEST(Shm, MemoryInCommonIsNamedWhereAnotherRankMakesAnotherCall) {
  run_threads(
      2,
      [](DistributedManager& manager) {
        const auto world = manager.world();
        auto t = torch::ones({3});
        if (world.rank() == 0)
          EXPECT_THROW(SharedMemory::make(world, 4096), MismatchError);
        else
          EXPECT_THROW(world.all_reduce(t), MismatchError);
      },
      over_shm());
}

TEST(Shm, MemoryInCommonIsNotWaitedForWhereARankHasEnded) {
  run_threads(
      2,
      [](DistributedManager& manager) {
        const auto world = manager.world();
        world.barrier();
        if (world.rank() == 0) {
          EXPECT_THROW(SharedMemory::make(world, 4096, {.timeout = 20s}), PeerLostError);
        }
      },
      over_shm());
}

TEST(Shm, SharedMemoryIsReducedWhereItLies) {
  for (int ranks = 2; ranks <= 3; ++ranks)
    run_threads(
        ranks,
        [](DistributedManager& manager) {
          const auto world = manager.world();
          const int r = world.rank(), n = world.size();
          ASSERT_TRUE(SharedMemory::available(world));
          auto memory = SharedMemory::make(world, 4 << 20);
          EXPECT_EQ(memory.bytes(), 4 << 20);
          {
            const auto few = memory.empty({3}), none = memory.empty({0, 7});
            EXPECT_EQ(memory.used(), 128);
          }
          EXPECT_EQ(memory.used(), 0);
          auto random = at::detail::createCPUGenerator(5 + r);
          for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kComplexDouble})
            for (const std::int64_t size : {0, 3, 5000, 100001}) {
              auto t = memory.empty({size}, dtype);
              const auto mine = torch::randn({size}, random, torch::kDouble).to(dtype);
              const auto elsewhere = mine.clone();
              for (const auto op : {ReduceOp::sum, ReduceOp::product}) {
                t.copy_(mine);
                elsewhere.copy_(mine);
                auto request = world.started().all_reduce(t, op);
                world.all_reduce(elsewhere, op);
                request.wait();
                EXPECT_TRUE(torch::equal(t, elsewhere)) << c10::toString(dtype) << size;
              }
              // The result of a reduction is its root's alone.
              t.copy_(mine);
              elsewhere.copy_(mine);
              world.reduce(t, 0);
              world.reduce(elsewhere, 0);
              EXPECT_TRUE(torch::equal(t, r == 0 ? elsewhere : mine));
              // A view, of which other ranks reach a part alone.
              if (size > 3) {
                t.copy_(mine);
                elsewhere.copy_(mine);
                world.all_reduce(t.narrow(0, 1, size - 1), ReduceOp::avg);
                auto tail = elsewhere.narrow(0, 1, size - 1).clone();
                world.all_reduce(tail, ReduceOp::avg);
                elsewhere.narrow(0, 1, size - 1).copy_(tail);
                EXPECT_TRUE(torch::equal(t, elsewhere));
              }
            }
          EXPECT_THROW(memory.empty({1 << 20}, torch::kDouble), NotAvailable);
          EXPECT_THROW(memory.empty({-1}), InvalidArgument);
          EXPECT_THROW(memory.empty({1}, torch::Device(torch::kMeta)), InvalidArgument);
          EXPECT_THROW(SharedMemory().empty({1}), NotAvailable);
          EXPECT_THROW(SharedMemory::make(world, 0), InvalidArgument);
          EXPECT_THROW(SharedMemory::make(world, 4096 * (1 + r)), MismatchError);
          EXPECT_THROW(SharedMemory::make(Group(), 4096), NotAvailable);
          // A tensor keeps its memory; the group goes on, with more of it as well.
          auto kept = memory.empty({50000}, torch::kDouble).fill_(r);
          memory = SharedMemory::make(world, 1 << 20);
          auto other = memory.empty({50000}, torch::kDouble).fill_(r);
          world.all_reduce(kept);
          world.all_reduce(other);
          EXPECT_TRUE(torch::equal(kept, torch::full_like(kept, n * (n - 1) / 2)));
          EXPECT_TRUE(torch::equal(other, kept));
        },
        over_shm());
}

}  // namespace
}  // namespace tessera::shm_test
