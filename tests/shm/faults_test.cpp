// What happens when ranks die, stop, leave, or disagree.

#include <gtest/gtest.h>

#include "cpus.h"
#include "ranks.h"

namespace tessera::shm::testing {
namespace {

/// Kinds of calls in which a rank may die.
std::function<void()> endless(Group& group, int kind) {
  return [&group, kind] {
    const int ranks = group.size(), me = group.rank();
    const std::size_t bytes = kind == 0 ? 8 : std::size_t{3} << 20;
    std::vector<std::byte> a(bytes * static_cast<std::size_t>(ranks)), b(a.size());
    const std::vector<std::size_t> sizes(static_cast<std::size_t>(ranks), bytes);
    for (;;) {
      switch (kind) {
        case 0:
        case 1:
          group.all_reduce(a.data(), a.data(), bytes / 8, Element::float64, {});
          break;
        case 2:
          group.broadcast(a.data(), bytes, 1);
          break;
        case 3:
          group.all_to_all(a.data(), sizes, b.data(), sizes);
          break;
        default:
          group.exchange({{Message::Kind::send, a.data(), bytes, (me + 1) % ranks, 0},
                          {Message::Kind::receive, b.data(), bytes, (me + ranks - 1) % ranks, 0}});
      }
    }
  };
}

TEST(Faults, KilledInEachPhase) {
  for (int kind = 0; kind < 5; ++kind) {
    SCOPED_TRACE(kind);
    const int victim = kind % 3;
    const auto body = [&](int rank, const Directory& directory) -> std::string {
      Group group = Group::meet(rank, 3, directory, brief("killed"));
      group.barrier();
      const auto begin = Clock::now();
      // It dies 30 ms later, wherever it is.
      if (rank == victim)
        std::thread([kind] {
          std::this_thread::sleep_for(milliseconds(30 + kind));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      const std::string end = outcome(endless(group, kind));
      const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin).count();
      // A later call says the same.
      const std::string again = outcome([&] { group.barrier(); });
      return took < 1000 ? concat(end, " | ", again) : concat("too late: ", took, " ms: ", end);
    };
    const auto ends = quickest([&] { return fork_ranks(3, body); });
    const std::string lost = concat("lost [", victim, "]");
    for (int r = 0; r < 3; ++r) {
      const auto& end = ends[static_cast<std::size_t>(r)];
      if (r == victim) {
        EXPECT_EQ(end.signal, SIGKILL);
      } else {
        expect_begins(end.report, lost);
        expect_has(end.report, concat("| ", lost));
      }
    }
  }
}

// Calls that are started before the one that is waited for.
TEST(Faults, KilledBehindStartedCalls) {
  for (const bool waits : {true, false}) {
    SCOPED_TRACE(waits);
    const auto body = [&](int rank, const Directory& directory) -> std::string {
      Group group = Group::meet(rank, 3, directory, brief("behind"));
      group.barrier();
      if (rank == 1) ::kill(::getpid(), SIGKILL);
      const auto begin = Clock::now();
      double value = 1;
      Request first = group.started().all_reduce(&value, &value, 1, Element::float64, {});
      const std::string end = outcome([&] {
        Request second = group.started().barrier();
        if (waits) second.wait();
        while (!second.test())
          if (Clock::now() - begin > milliseconds(3000)) throw Error("nobody says so");
      });
      const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin).count();
      return took < 1000 ? end : concat("too late: ", took, " ms: ", end);
    };
    const auto ends = quickest([&] { return fork_ranks(3, body); });
    for (const int r : {0, 2}) expect_begins(ends[static_cast<std::size_t>(r)].report, "lost [1]");
  }
}

TEST(Faults, MemoryOfAThreadThatGaveUpIsNotRead) {
  // Memory of this size goes back to the kernel at once: whoever read it would end the process.
  for (int run = 0; run < 12; ++run) {
    const int kind = 2 + run % 3;
    SCOPED_TRACE(kind);
    const auto ends = thread_ranks(3, brief("dropped"), [&](Group& group) -> std::string {
      std::thread other;
      if (group.rank() == run % 2)
        other = std::thread([&] {
          std::this_thread::sleep_for(milliseconds(3 + run));
          if (run < 6) return group.abort("enough");
          group.interrupt("enough");
        });
      const std::string end = outcome(endless(group, kind));
      if (other.joinable()) other.join();
      group.abort("the end of the test");
      return end;
    });
    for (const RankEnd& end : ends) expect_begins(end.report, "lost [");
  }
}

/// Once the kernel says that the process is stopped.
void await_stopped(const std::string& process) {
  const Deadline deadline = deadline_after(milliseconds(10000));
  for (;;) {
    std::ifstream status("/proc/" + process + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("State:\tT")) return;
    if (time_left(deadline).count() == 0) throw Error("rank 1 does not stop");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(Faults, StoppedIsLate) {
  for (int kind = 0; kind < 2; ++kind) {
    const auto ends = fork_ranks(
        3,
        [&](int rank, const Directory& directory) -> std::string {
          Group group = Group::meet(rank, 3, directory, brief("stopped"));
          group.barrier();
          if (rank == 1) {
            directory.put("process", std::to_string(::getpid()));
            ::raise(SIGSTOP);
          }
          await_stopped(directory.get("process", milliseconds(10000)));
          // Ranks 0 and 2 call at the same time, so that the limit finds rank 1 alone missing.
          directory.put(concat("calls ", rank), "");
          directory.get(concat("calls ", 2 - rank), milliseconds(10000));
          double value = 1;
          const Call call{milliseconds(1000)};
          return outcome([&] {
            kind == 0 ? group.all_reduce(&value, &value, 1, Element::float64, {}, call)
                      : group.receive(&value, 8, 1, 0, call);
          });
        },
        milliseconds(20000), 1);
    for (const int r : {0, 2}) {
      expect_begins(ends[static_cast<std::size_t>(r)].report, "late [1]");
      expect_has(ends[static_cast<std::size_t>(r)].report, "is stopped");
    }
  }
}

TEST(Faults, StoppedBehindStartedCallsIsLate) {
  for (const int calls : {1, 100}) {
    SCOPED_TRACE(calls);
    const auto ends = fork_ranks(
        3,
        [&](int rank, const Directory& directory) -> std::string {
          Group group = Group::meet(rank, 3, directory, brief("behind"));
          group.barrier();
          if (rank == 2) {
            directory.put("process", std::to_string(::getpid()));
            ::raise(SIGSTOP);
          }
          await_stopped(directory.get("process", milliseconds(10000)));
          std::vector<double> values(static_cast<std::size_t>(calls));
          std::vector<Request> requests;
          for (double& value : values)
            requests.push_back(group.started().all_reduce(&value, &value, 1, Element::float64, {}));
          // So that the limit finds rank 2 alone missing.
          directory.put(concat("calls ", rank), "");
          directory.get(concat("calls ", 1 - rank), milliseconds(10000));
          return outcome([&] { group.barrier({milliseconds(1000)}); });
        },
        milliseconds(20000), 2);
    for (const int r : {0, 1}) {
      expect_begins(ends[static_cast<std::size_t>(r)].report, "late [2]");
      expect_has(ends[static_cast<std::size_t>(r)].report, "waited for ranks [2]");
    }
  }
}

// In the tree of a broadcast between ranks that share a core, a rank waits for its children alone:
// 0 for 1 and 2, 2 for 3.
TEST(Faults, ATreeNamesWhoIsWaitedFor) {
  const std::vector<int> one = allowed_cpus(1);
  const auto ends = fork_ranks(4, [&](int rank, const Directory& directory) -> std::string {
    run_on(one);
    Group group = Group::meet(rank, 4, directory, brief("tree"));
    if (!group.describe().single_copy) return "no tree";
    std::vector<std::byte> data(std::size_t{1} << 20);
    // Ranks 1 and 3 do not come. The limit of 0 is far away, so that 2 speaks first.
    const milliseconds limit(rank == 0 ? 10000 : 1000);
    std::string report = "absent";
    if (rank % 2 == 0)
      report = outcome([&] { group.broadcast(data.data(), data.size(), 0, {limit}); });
    directory.put(concat("done ", rank), "");
    for (const int r : {0, 2}) directory.get(concat("done ", r), milliseconds(15000));
    return report;
  });
  if (ends[0].report == "no tree") GTEST_SKIP() << "the kernel forbids process_vm_readv here";
  expect_begins(ends[2].report, "late [3]");
  expect_has(ends[2].report, "waited for ranks [3]");
  expect_has(ends[0].report, "rank 2 gave up");
}

TEST(Faults, LeftAndAborted) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    std::string report;
    {
      Group group = Group::meet(rank, 2, directory, brief("left"));
      group.barrier();
      if (rank == 0) report = outcome([&] { group.barrier(); });
    }
    Group group = Group::meet(rank, 2, directory, brief("aborted"));
    std::thread other;
    if (rank == 1)
      other = std::thread([&group] {
        std::this_thread::sleep_for(milliseconds(50));
        group.abort("enough");
      });
    // Both wait for a message that never comes, of each other.
    int nothing = 0;
    report += " | " + outcome([&] { group.receive(&nothing, sizeof nothing, 1 - rank); });
    if (other.joinable()) other.join();
    return report;
  });
  expect_begins(ends[0].report, "lost [1]");
  expect_has(ends[0].report, "has left the group | lost [1]");
  expect_has(ends[0].report, "enough");
  expect_begins(ends[1].report, " | lost [1]");
  expect_has(ends[1].report, "enough");
}

// A call that has nothing to do says, too, that the group has ended.
TEST(Faults, EmptyCallsAfterTheEnd) {
  auto groups = Group::threads(2, brief("empty"));
  double nothing = 0;
  const auto empty = [&](Group& group) {
    return outcome([&] { group.reduce_scatter(&nothing, &nothing, 0, Element::float64, {}); });
  };
  EXPECT_EQ(empty(groups[0]), "good");
  EXPECT_THROW(
      groups[0].reduce_scatter(nullptr, nullptr, 0, Element::float64, {Reduction::Kind::bit_and}),
      InvalidArgument);
  groups[1].interrupt("enough");
  EXPECT_EQ(empty(groups[0]), "good");
  EXPECT_NE(empty(groups[1]), "good");
  groups[1].abort("enough");
  EXPECT_NE(empty(groups[0]), "good");
}

TEST(Faults, LimitsOfAllLengths) {
  const auto body = [](Group& group) -> std::string {
    double value = 1;
    group.all_reduce(&value, &value, 1, Element::float64, {}, {milliseconds::max()});
    Request request = group.started().barrier({milliseconds::max()});
    request.wait(milliseconds::max());
    if (group.rank() == 1) return "";
    const auto begin = Clock::now();
    std::string end = outcome([&] { group.barrier({milliseconds(1)}); });
    return Clock::now() - begin < milliseconds(500) ? end : "too late: " + end;
  };
  const auto ends = quickest([&] { return thread_ranks(2, brief("limits"), body); });
  expect_begins(ends[0].report, "late [1]");
}

TEST(Faults, DifferentCallsAreNoticed) {
  const std::vector<std::function<void(Group&)>> calls = {
      [](Group& g) {
        double v[3] = {};
        g.all_reduce(v, v, g.rank() == 0 ? 2 : 3, Element::float64, {});
      },
      [](Group& g) {
        double v[2] = {};
        if (g.rank() == 0)
          g.all_reduce(v, v, 2, Element::float64, {});
        else
          g.barrier();
      },
      [](Group& g) {
        double v[2] = {};
        g.all_reduce(v, v, 2, Element::float64,
                     {g.rank() == 0 ? Reduction::Kind::sum : Reduction::Kind::max});
      },
      [](Group& g) {
        std::vector<double> v(100000);
        g.all_reduce(v.data(), v.data(), g.rank() == 0 ? 100000 : 99999, Element::float64, {});
      },
      // Each rank takes itself for the root, and none reads what another has published.
      [](Group& g) {
        double v[2] = {};
        g.broadcast(v, sizeof v, g.rank());
        g.barrier();
      },
      [](Group& g) {
        double v[2] = {};
        g.scatter(v, v, {8, 8}, g.rank());
        g.all_reduce(v, v, 2, Element::float64, {});
      },
      [](Group& g) {
        int v[2] = {};
        if (g.rank() == 0) g.send(v, 8, 1);
        g.receive(v, g.rank() == 0 ? 8 : 4, 1 - g.rank());
      }};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    for (const auto& end : thread_ranks(2, brief("different"), [&](Group& group) {
           return outcome([&] { calls[i](group); });
         }))
      expect_begins(end.report, "mismatch");
  }
}

// Messages that nobody awaits fill the memory of their receiver up to a limit.
TEST(Faults, MessagesThatNobodyAwaitsAreLimited) {
  for (const std::size_t bytes : {std::size_t{100000}, std::size_t{300000}}) {
    Options options = brief("kept");
    options.kept_bytes = 1000000;
    const auto ends = thread_ranks(2, options, [&](Group& group) -> std::string {
      std::vector<std::byte> data(bytes);
      const auto pass = [&](int count) {
        std::vector<Request> requests;
        for (int i = 0; i < count && group.rank() == 0; ++i)
          requests.push_back(group.started().send(data.data(), bytes, 1, 1));
        if (group.rank() == 0) return group.send(data.data(), 8, 1, 2);
        group.receive(data.data(), 8, 0, 2);
        for (int i = 0; i < count; ++i) group.receive(data.data(), bytes, 0, 1);
      };
      const int most = static_cast<int>(options.kept_bytes / bytes);
      // What has been received does not count any more.
      const std::string below = outcome([&] {
        for (int i = 0; i < 3; ++i) pass(most);
        group.barrier();
      });
      return below + " | " + outcome([&] { pass(most + 1); });
    });
    for (const auto& end : ends) {
      expect_begins(end.report, "good | mismatch");
      expect_has(end.report, "does not await yet");
    }
  }
}

TEST(Faults, WrongArguments) {
  EXPECT_THROW(Group::threads(0, {}), InvalidArgument);
  EXPECT_THROW(Group::threads(600, {}), SetupError);
  auto groups = Group::threads(1, {});
  Group& g = groups[0];
  double v = 1;
  EXPECT_THROW(g.broadcast(&v, 8, 1), InvalidArgument);
  EXPECT_THROW(g.all_reduce(nullptr, &v, 1, Element::float64, {}), InvalidArgument);
  EXPECT_THROW(g.all_reduce(&v, &v, 1, Element::float64, {Reduction::Kind::bit_xor}),
               InvalidArgument);
  EXPECT_THROW(g.all_gather(&v, &v, {1, 2}), InvalidArgument);
  EXPECT_THROW(g.send(&v, 8, 2), InvalidArgument);
  g.all_reduce(&v, &v, 1, Element::float64, {});  // Nothing of that harmed the group.
}

TEST(Faults, ArenaFull) {
  Options options = brief("arena");
  options.arena_bytes = 1 << 20;
  auto groups = Group::threads(1, options);
  Arena& arena = groups[0].arena();
  std::byte* a = arena.allocate(400000);
  std::byte* b = arena.allocate(400000);
  try {
    arena.allocate(400000);
    FAIL();
  } catch (const ArenaFull& error) {
    expect_has(error.what(), "400000 bytes are asked of an arena of 1048576 bytes");
  }
  EXPECT_EQ(arena.try_allocate(400000), nullptr);
  EXPECT_THROW(arena.deallocate(a + 64), InvalidArgument);
  arena.deallocate(a);
  EXPECT_THROW(arena.deallocate(a), InvalidArgument);
  arena.deallocate(b);
  EXPECT_EQ(arena.largest_free(), arena.size());
  EXPECT_EQ(arena.used(), 0U);
  auto none = Group::threads(1, brief("none"));
  EXPECT_THROW(none[0].arena().allocate(1), ArenaFull);
}

TEST(Faults, GroupsOfOneNameDoNotCollide) {
  const Files other;
  const Directory second = other.directory();
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    Group a = Group::meet(rank, 2, directory, brief("same")),
          b = Group::meet(rank, 2, second, brief("same"));
    double x = rank + 1, y = 10 * (rank + 1);
    Request first = a.started().all_reduce(&x, &x, 1, Element::float64, {});
    b.all_reduce(&y, &y, 1, Element::float64, {});
    first.wait();
    b.barrier();
    return concat(x, " ", y);
  });
  for (const auto& end : ends) EXPECT_EQ(end.report, "3 30");
}

}  // namespace
}  // namespace tessera::shm::testing
