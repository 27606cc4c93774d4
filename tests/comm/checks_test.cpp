// Ranks that call different things, ranks that fail, ranks that do not come: what the others are
// told. Ranks are threads.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "tessera/comm/job/threads.h"

namespace tessera::checks_test {
namespace {

using torch::Tensor;
using Call = std::function<void(const Group&)>;

ManagerOptions options_for(const std::string& backend, CheckLevel level,
                           std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = timeout;
  options.check_level = level;
  return options;
}

// Where a test must hold a rank back until others are through; bounded, so that a failing test
// ends.
class Gate {
 public:
  /// Is open when so many have opened it.
  explicit Gate(int keys) : keys_(keys) {}
  void open() {
    const std::lock_guard lock(mutex_);
    --keys_;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60), [this] { return keys_ <= 0; }));
  }
  /// Returns when all have come. What a rank does next meets no other in a call before it: a rank
  /// that is still in a barrier when another one fails has that error there.
  void meet() {
    open();
    pass();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int keys_;
};

struct Pair {
  std::string name;
  Call most, odd;                  // `odd` is called by the last rank
  std::vector<std::string> words;  // both calls' marks, in every rank's message
};

std::vector<Pair> mismatches() {
  auto reduce = [](std::vector<std::int64_t> shape, c10::ScalarType dtype = torch::kFloat,
                   ReduceOp op = ReduceOp::sum, std::string name = "") -> Call {
    return [=](const Group& g) { g.all_reduce(torch::ones(shape, dtype), op, {.name = name}); };
  };
  std::vector<Pair> pairs;
  pairs.push_back({"operation",
                   reduce({4}),
                   [](const Group& g) { g.broadcast(torch::ones({4}), 0); },
                   {"all_reduce", "broadcast"}});
  pairs.push_back(
      {"barrier", reduce({4}), [](const Group& g) { g.barrier(); }, {"all_reduce", "barrier"}});
  pairs.push_back({"shape", reduce({4}), reduce({5}), {"[4]", "[5]"}});
  pairs.push_back(
      {"large shape", reduce({1 << 20}), reduce({(1 << 20) + 1}), {"1048576", "1048577"}});
  pairs.push_back({"rank of shape", reduce({4}), reduce({2, 2}), {"[4]", "[2, 2]"}});
  pairs.push_back({"dtype", reduce({4}), reduce({4}, torch::kInt), {"Float", "Int"}});
  pairs.push_back(
      {"reduce operation", reduce({4}), reduce({4}, torch::kFloat, ReduceOp::max), {"sum", "max"}});
  pairs.push_back({"name",
                   reduce({4}, torch::kFloat, ReduceOp::sum, "weight"),
                   reduce({4}, torch::kFloat, ReduceOp::sum, "bias"),
                   {"weight", "bias"}});
  pairs.push_back({"root",
                   [](const Group& g) { g.broadcast(torch::ones({4}), 0); },
                   [](const Group& g) { g.broadcast(torch::ones({4}), 1); },
                   {"root 0", "root 1"}});
  pairs.push_back({"sizes",
                   [](const Group& g) {
                     g.all_gather(torch::ones({3 * g.size(), 2}), torch::ones({3, 2}),
                                  Sizes(g.size(), 3));
                   },
                   [](const Group& g) {
                     Sizes sizes(g.size(), 2);
                     sizes.back() = 3;
                     g.all_gather(torch::ones({2 * g.size() + 1, 2}), torch::ones({3, 2}), sizes);
                   },
                   {"3]", "sizes [2"}});
  pairs.push_back(
      {"argument",
       reduce({4}),
       [](const Group& g) { g.all_reduce(torch::ones({4}, torch::kLong), ReduceOp::avg); },
       {"refused", "avg"}});
  return pairs;
}

class Checks : public ::testing::TestWithParam<std::string> {};

TEST_P(Checks, RanksThatCallDifferentThingsAllThrowBeforeDataMoves) {
  for (const int n : {2, 3, 4})
    for (const auto& pair : mismatches()) {
      std::atomic<int> told{0};
      run_threads(
          n,
          [&](DistributedManager& manager) {
            const auto world = manager.world();
            try {
              (world.rank() == n - 1 ? pair.odd : pair.most)(world);
              ADD_FAILURE() << pair.name << ": no error on rank " << world.rank();
            } catch (const MismatchError& e) {
              ++told;
              for (const auto& word : pair.words)
                EXPECT_NE(std::string(e.what()).find(word), std::string::npos)
                    << pair.name << ": " << e.what();
            }
            // The ranks are still in step: the group goes on.
            auto t = torch::ones({2});
            world.all_reduce(t);
            EXPECT_EQ(t[0].item<double>(), n);
          },
          options_for(GetParam(), CheckLevel::collective));
      EXPECT_EQ(told, n) << pair.name;
    }
}

TEST_P(Checks, CallsInAnotherOrderAreFoundByTheirNames) {
  run_threads(
      2,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        const bool first = world.rank() == 0;
        auto t = torch::ones({8});
        EXPECT_THROW(world.all_reduce(t, ReduceOp::sum, {.name = first ? "layer1" : "layer2"}),
                     MismatchError);
        EXPECT_TRUE(t.equal(torch::ones({8})));
      },
      options_for(GetParam(), CheckLevel::collective));
}

TEST_P(Checks, SizesOfAllToAllThatDoNotFitAreReportedOnEveryRank) {
  run_threads(
      3,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        Sizes out(3, 2), in(3, 2);
        if (world.rank() == 1) in[2] = 4;
        EXPECT_THROW(world.all_to_all(torch::zeros({6, 2}),
                                      torch::zeros({world.rank() == 1 ? 8 : 6, 2}), out, in),
                     MismatchError);
      },
      options_for(GetParam(), CheckLevel::collective));
}

struct Ends {
  std::string name;
  Call sends, receives;            // of rank 0 to rank 1
  std::vector<std::string> words;  // of both ends
};

std::vector<Ends> messages_that_do_not_fit() {
  auto send = [](std::vector<std::int64_t> shape, c10::ScalarType dtype = torch::kFloat,
                 std::string name = "") -> Call {
    return [=, t = torch::ones(shape, dtype)](const Group& g) { g.send(t, 1, {.name = name}); };
  };
  auto receive = [](std::vector<std::int64_t> shape, c10::ScalarType dtype = torch::kFloat,
                    std::string name = "") -> Call {
    return [=, t = torch::zeros(shape, dtype)](const Group& g) {
      g.receive(t, 0, {.name = name});
      ADD_FAILURE() << "received " << t;
    };
  };
  auto started = [](Message::Kind kind, std::vector<std::int64_t> first) -> Call {
    return [=](const Group& g) {
      const int peer = 1 - g.rank();
      auto a =
          g.started().exchange({{kind, torch::ones(first), peer}, {kind, torch::ones({5}), peer}});
      a.wait();
    };
  };
  return {
      {"shorter", send({4}), receive({5}), {"Float[4]", "Float[5]"}},
      {"longer", send({5}), receive({4}), {"Float[4]", "Float[5]"}},
      {"long", send({1 << 20}), receive({(1 << 20) + 1}), {"1048576", "1048577"}},
      {"shape", send({2, 3}), receive({3, 2}), {"[2, 3]", "[3, 2]"}},
      {"dtype", send({4}), receive({4}, torch::kInt), {"Float[4]", "Int[4]"}},
      {"empty", send({0}), receive({4}), {"[0]", "[4]"}},
      {"into nothing", send({4}), receive({0}), {"[0]", "[4]"}},
      {"name",
       send({4}, torch::kFloat, "rows"),
       receive({4}, torch::kFloat, "columns"),
       {"'rows'", "'columns'"}},
      {"batch",
       started(Message::Kind::send, {4}),
       started(Message::Kind::receive, {6}),
       {"[4]", "[6]", "exchange"}},
      {"refused sender",
       [](const Group& g) { g.send(torch::ones({2, 2}).to_sparse(), 1); },
       receive({2, 2}),
       {"to_dense", "[2, 2]"}},
      {"refused receiver",
       send({3}),
       [](const Group& g) { g.receive(torch::ones({1}).expand({3}), 0); },
       {"share memory", "[3]"}},
  };
}

TEST_P(Checks, BothEndsOfAMessageThatDoesNotFitThrow) {
  for (const int n : {2, 3})
    for (const auto& ends : messages_that_do_not_fit()) {
      std::atomic<int> told{0};
      run_threads(
          n,
          [&](DistributedManager& manager) {
            const auto world = manager.world();
            if (world.rank() < 2) {
              try {
                (world.rank() == 0 ? ends.sends : ends.receives)(world);
                ADD_FAILURE() << ends.name << ": no error on rank " << world.rank();
              } catch (const MismatchError& e) {
                ++told;
                for (const auto& word : ends.words)
                  EXPECT_NE(std::string(e.what()).find(word), std::string::npos)
                      << ends.name << ": " << e.what();
              } catch (const InvalidArgument&) {
                EXPECT_EQ(ends.name.rfind("refused", 0), 0u) << ends.name;
                ++told;
              }
              // The two are still in step.
              auto t = torch::full({3}, world.rank(), torch::kFloat);
              world.rank() == 0 ? world.send(t, 1) : world.receive(t, 0);
              EXPECT_EQ(t[2].item<double>(), 0);
            }
            world.barrier();
          },
          options_for(GetParam(), CheckLevel::collective));
      EXPECT_EQ(told, 2) << ends.name;
    }
}

// What a rank starts goes on while it waits for something else: messages against the order of the
// waits, a collective in between.
TEST_P(Checks, ComparedMessagesTravelInAnyOrderOfWaits) {
  for (const int n : {2, 3, 4})
    run_threads(
        n,
        [&](DistributedManager& manager) {
          const auto world = manager.world();
          const int me = world.rank(), next = (me + 1) % n, before = (me + n - 1) % n;
          for (int round = 0; round < 20; ++round) {
            auto got = torch::zeros({1 << 15}, torch::kDouble), more = torch::zeros({0, 3});
            auto sent = world.started().send(
                torch::full({1 << 15}, me + 10.0 * round, torch::kDouble), next);
            auto second = world.started().send(torch::full({7}, me, torch::kFloat), next);
            auto received = world.started().receive(got, before);
            sent.wait();
            world.barrier();
            auto small = torch::zeros({7});
            world.receive(small, before);
            second.wait();
            received.wait();
            EXPECT_TRUE(got.eq(before + 10.0 * round).all().item<bool>());
            EXPECT_TRUE(small.eq(before).all().item<bool>());
            world.exchange({{Message::Kind::send, more, next},
                            {Message::Kind::receive, more.clone(), before}});
          }
        },
        options_for(GetParam(), CheckLevel::collective));
}

// Others that take part in the call do not wait for what does not come.
TEST_P(Checks, AMessageThatDoesNotFitEndsTheCallOfAll) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> told{0};
  run_threads(
      3,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        std::vector<Message> messages;
        for (int peer = 0; peer < 3; ++peer) {
          messages.push_back(
              {Message::Kind::send, torch::ones({world.rank() == 1 && peer == 2 ? 8 : 2}), peer});
          messages.push_back({Message::Kind::receive, torch::ones({2}), peer});
        }
        try {
          world.exchange(messages);
          ADD_FAILURE() << "no error on rank " << world.rank();
        } catch (const CommError& e) {
          ++told;
          for (const auto* word : {"rank 1", "rank 2", "[8]", "[2]"})
            EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
        }
      },
      options_for(GetParam(), CheckLevel::collective));
  EXPECT_EQ(told, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

TEST_P(Checks, OverlapIsRefusedByLocalChecksOnly) {
  run_threads(
      1,
      [&](DistributedManager& manager) {
        auto world = manager.world();
        auto t = torch::arange(6.0);
        EXPECT_THROW(world.all_gather(t, t), InvalidArgument);
        EXPECT_THROW(world.broadcast(torch::ones({1}).expand({3}), 0), InvalidArgument);
        world.set_check_level(CheckLevel::off);
        EXPECT_NO_THROW(world.all_gather(t, t));
      },
      options_for(GetParam(), CheckLevel::local));
}

// A rank that throws: the others' pending and later calls fail fast, far below the time limit, with
// its reason.
TEST_P(Checks, ARankThatThrowsEndsTheOthers) {
  for (const auto& pending :
       std::vector<Call>{[](const Group& g) { g.all_reduce(torch::ones({3})); },
                         [](const Group& g) { g.barrier(); },
                         [](const Group& g) { g.all_gather(torch::ones({3}), torch::ones({1})); },
                         [](const Group& g) {
                           auto t = torch::ones({1});
                           g.rank() == 1 ? g.receive(t, 0) : g.receive(t, 1);
                         },
                         [](const Group& g) {
                           auto t = torch::ones({1 << 16});
                           g.started().all_reduce(t).wait();
                         }}) {
    const auto begin = std::chrono::steady_clock::now();
    std::atomic<int> told{0};
    Gate through(3);
    std::string message;
    try {
      run_threads(
          3,
          [&](DistributedManager& manager) {
            const auto world = manager.world();
            world.barrier();
            through.meet();
            if (world.rank() == 0) throw std::out_of_range("no such sample");
            try {
              pending(world);
              ADD_FAILURE() << "no error on rank " << world.rank();
            } catch (const PeerLostError& e) {
              ++told;
              EXPECT_EQ(e.ranks(), std::vector<int>{0}) << e.what();
              EXPECT_NE(std::string(e.what()).find("no such sample"), std::string::npos)
                  << e.what();
            }
            EXPECT_THROW(world.barrier(), PeerLostError);
          },
          options_for(GetParam(), CheckLevel::local));
      ADD_FAILURE() << "run_threads returned";
    } catch (const std::out_of_range& e) {
      message = e.what();
    }
    EXPECT_EQ(message, "no such sample");
    EXPECT_EQ(told, 2);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  }
}

TEST_P(Checks, OurErrorsAreRethrownWithTheRank) {
  try {
    run_threads(
        2,
        [&](DistributedManager& manager) {
          const auto world = manager.world();
          if (world.rank() == 1) world.broadcast(torch::ones({1}), 7);
          world.barrier();
        },
        options_for(GetParam(), CheckLevel::local));
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_EQ(std::string(e.what()).rfind("rank 1: ", 0), 0u) << e.what();
    EXPECT_NE(std::string(e.what()).find("root 7"), std::string::npos) << e.what();
  }
}

TEST_P(Checks, ARankThatDoesNotComeIsNamedAtTheLimit) {
  std::atomic<int> told{0};
  Gate through(3), gate(2);
  run_threads(
      3,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        world.barrier();
        through.meet();
        if (world.rank() == 2) {
          gate.pass();
          return;
        }
        try {
          world.all_reduce(torch::ones({3}), ReduceOp::sum,
                           {.timeout = std::chrono::milliseconds(1500), .name = "loss"});
          ADD_FAILURE() << "no error";
        } catch (const TimeoutError& e) {
          EXPECT_EQ(e.missing(), std::vector<int>{2}) << e.what();
          for (const auto* word : {"all_reduce", "loss", "world", "1500"})
            EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
        }
        EXPECT_THROW(world.barrier(), CommError);
        ++told;
        gate.open();
      },
      options_for(GetParam(), CheckLevel::local));
  EXPECT_EQ(told, 2);
}

TEST_P(Checks, AbortTellsTheOthersWhy) {
  Gate through(3);
  run_threads(
      3,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        world.barrier();
        through.meet();
        if (world.rank() == 1) {
          world.abort("the disk is full");
          EXPECT_THROW(world.barrier(), CommError);
          return;
        }
        try {
          world.all_reduce(torch::ones({3}));
          ADD_FAILURE() << "no error";
        } catch (const PeerLostError& e) {
          EXPECT_NE(std::string(e.what()).find("the disk is full"), std::string::npos) << e.what();
          EXPECT_EQ(e.ranks(), std::vector<int>{1});
        }
      },
      options_for(GetParam(), CheckLevel::local));
}

INSTANTIATE_TEST_SUITE_P(Backends, Checks, ::testing::Values("threads", "gloo", "shm"),
                         [](const auto& info) { return info.param; });

TEST(ThreadsAlone, ARankThatEndsEarlyDoesNotLetTheOthersWait) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_threads(
                   2,
                   [&](DistributedManager& manager) {
                     const auto world = manager.world();
                     if (world.rank() == 0) world.barrier();
                   },
                   options_for("threads", CheckLevel::local)),
               PeerLostError);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

// Without any check, the backend itself sees what differs.
TEST(ThreadsAlone, MismatchIsFoundWithChecksOff) {
  run_threads(
      3,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        auto t = torch::ones({world.rank() == 1 ? 5 : 4});
        EXPECT_THROW(world.all_reduce(t), MismatchError);
        EXPECT_THROW(world.broadcast(torch::ones({2}), world.rank() == 0 ? 0 : 1), MismatchError);
        EXPECT_TRUE(t.equal(torch::ones_like(t)));
        // Of those that differ from the root the first one is shown.
        try {
          world.broadcast(torch::ones({world.rank() == 2 ? 4 : 5}), 2);
          ADD_FAILURE() << "no error";
        } catch (const MismatchError& e) {
          EXPECT_NE(std::string(e.what()).find("rank 0 called"), std::string::npos) << e.what();
        }
      },
      options_for("threads", CheckLevel::off));
}

TEST(ThreadsAlone, BadRequestsOfRunThreads) {
  EXPECT_THROW(run_threads(0, [](DistributedManager&) {}), InvalidArgument);
  EXPECT_THROW(run_threads(
                   1, [](DistributedManager&) {}, options_for("nccl", CheckLevel::local)),
               InvalidArgument);
}

}  // namespace
}  // namespace tessera::checks_test
