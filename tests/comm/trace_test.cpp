// Traces: counts, bytes, names, timelines that a JSON parser accepts.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/threads.h"

namespace tessera::trace_test {
namespace {

// One rank comes later than the other, which waits for it in either kind of call.
TEST(WaitTime, CountsWhatThisThreadWaitsInCalls) {
  using Clock = WaitTime::Clock;
  // Far longer than a busy machine keeps a rank from its call, which is what it does not wait for.
  constexpr auto kLate = std::chrono::milliseconds(400);
  std::atomic<int> called{0};
  run_threads(2, [&](DistributedManager& manager) {
    EXPECT_FALSE(WaitTime::counts());
    const WaitTime all;
    for (int round = 1; round <= 2; ++round) {
      const WaitTime waiting;
      EXPECT_TRUE(WaitTime::counts());
      torch::Tensor x = torch::ones({5});
      if (manager.rank() == 0) {
        ++called;
      } else {
        while (called < round) std::this_thread::yield();
        std::this_thread::sleep_for(kLate);
      }
      if (round == 1) {
        manager.world().all_reduce(x);
      } else {
        auto started = manager.world().started().all_reduce(x, ReduceOp::sum);
        EXPECT_EQ(waiting.total(), Clock::duration::zero()) << "the rank goes on with its work";
        started.wait();
      }
      EXPECT_GT(waiting.total(), Clock::duration::zero());
      if (manager.rank() == 0) {
        EXPECT_GT(waiting.total(), kLate / 2);
      }
    }
    if (manager.rank() == 0) {
      EXPECT_GT(all.total(), kLate);
    }
    bool elsewhere = true;
    std::thread([&] { elsewhere = WaitTime::counts(); }).join();
    EXPECT_FALSE(elsewhere);
  });
  EXPECT_FALSE(WaitTime::counts());
}

TEST(Trace, CountsCallsAndBytesOfOperationsAndGroups) {
  run_threads(2, [](DistributedManager& manager) {
    const auto before = manager.world();
    CommTraceScope trace(manager);
    for (int i = 0; i < 3; ++i) before.all_reduce(torch::ones({5}));
    auto all = torch::empty({4}, torch::kDouble);
    const auto reversed = manager.group({1, 0});  // made while the trace is on
    reversed.all_gather(all, torch::ones({2}, torch::kDouble), {}, {.name = "corners"});
    auto request = before.started().all_reduce(torch::ones({2}), ReduceOp::max);
    request.wait();
    before.rank() == 0 ? before.send(torch::ones({7}), 1) : before.receive(torch::ones({7}), 0);

    const auto sums = trace->summary();
    auto find = [&](const std::string& operation, const std::string& group) {
      for (const auto& sum : sums)
        if (sum.operation == operation && sum.group == group) return sum;
      ADD_FAILURE() << "no " << operation << " in " << group << "\n" << trace->table();
      return CommSummary{};
    };
    EXPECT_EQ(find("all_reduce", "world").count, 4);
    EXPECT_EQ(find("all_reduce", "world").bytes, 3 * 20 + 8);
    EXPECT_EQ(find("all_gather", reversed.name()).bytes, 16);
    EXPECT_EQ(find(before.rank() == 0 ? "send" : "receive", "world").bytes, 28);
    EXPECT_EQ(sums.size(), 3u) << trace->table();
    for (const auto& event : trace->events()) EXPECT_GE(event.end, event.begin);
    EXPECT_NE(trace->table().find("all_reduce"), std::string::npos);
  });
}

TEST(Trace, EndsWithItsScope) {
  std::shared_ptr<CommTrace> kept;
  Group alone;
  {
    CommTraceScope trace(alone);
    kept = trace.get();
    alone.barrier();
  }
  alone.barrier();
  EXPECT_EQ(kept->events().size(), 1u);
  kept->clear();
  EXPECT_TRUE(kept->summary().empty());
}

TEST(Trace, ChecksAreNotCallsOfTheUser) {
  ManagerOptions options;
  options.check_level = CheckLevel::collective;
  run_threads(
      2,
      [](DistributedManager& manager) {
        const auto world = manager.world();
        CommTraceScope trace(world);
        world.all_reduce(torch::ones({5}));
        EXPECT_EQ(trace->events().size(), 1u);
      },
      options);
}

TEST(Trace, TimelineIsJson) {
  Group alone;
  CommTraceScope trace(alone);
  alone.all_reduce(torch::ones({2}), ReduceOp::sum,
                   {.name = "a \"quoted\" \\ name\nwith\ttabs \x01"});
  alone.barrier();
  const auto path = std::filesystem::temp_directory_path() /
                    ("tessera_trace_" + std::to_string(::getpid()) + ".json");
  trace->write_timeline(path.string(), 3);
  const std::string program =
      "import json, sys; d = json.load(open(sys.argv[1])); e = [x for x in d['traceEvents'] if "
      "x['ph'] == 'X']; "
      "assert len(e) == 2 and all(x['pid'] == 3 and x['dur'] >= 0 for x in e), d; assert 'quoted' "
      "in e[0]['name'] and e[0]['args']['bytes'] == 8, d";
  // NOLINTNEXTLINE(bugprone-command-processor)
  EXPECT_EQ(std::system(("python3 -c \"" +
                         [&] {
                           std::string escaped;
                           for (const char c : program)
                             escaped += c == '"' ? std::string("\\\"") : std::string(1, c);
                           return escaped;
                         }() +
                         "\" " + path.string())
                            .c_str()),
            0);
  std::filesystem::remove(path);
  EXPECT_THROW(trace->write_timeline("/no/such/folder/x.json"), Error);
}

}  // namespace
}  // namespace tessera::trace_test
