// A rank is killed, stopped, throws or aborts while the others are in a call: they throw the right
// error in time, and end without a crash.

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string_view>

#include "fork_ranks.h"
#include "on_hosts.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kWorld = 3;
// x 8 floats: more than the sockets hold, so that a call really is under way
constexpr std::int64_t kRows = 30000;

using Call = std::function<Request(const Group&, int victim)>;

at::Tensor rows(std::int64_t n) { return at::ones({n, 8}); }

struct Operation {
  const char* name;
  Call start;
};

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      {"broadcast",
       [](const Group& g, int victim) { return g.started().broadcast(rows(kRows), victim); }},
      {"all_reduce", [](const Group& g, int) { return g.started().all_reduce(rows(kRows)); }},
      {"reduce", [](const Group& g,
                    int victim) { return g.started().reduce(rows(kRows), (victim + 1) % kWorld); }},
      {"all_gather", [](const Group& g,
                        int) { return g.started().all_gather(rows(kRows * kWorld), rows(kRows)); }},
      {"all_gather",
       [](const Group& g, int) {
         const Sizes sizes{kRows, 0, 7};
         return g.started().all_gather(rows(kRows + 7), rows(sizes[g.rank()]), sizes);
       }},
      {"reduce_scatter",
       [](const Group& g, int) {
         return g.started().reduce_scatter(rows(kRows), rows(kRows * kWorld));
       }},
      {"all_to_all",
       [](const Group& g, int) {
         return g.started().all_to_all(rows(kRows * kWorld), rows(kRows * kWorld));
       }},
      {"gather",
       [](const Group& g, int victim) {
         return g.started().gather(rows(kRows * kWorld), rows(kRows), (victim + 1) % kWorld);
       }},
      {"scatter",
       [](const Group& g, int victim) {
         return g.started().scatter(rows(kRows), rows(kRows * kWorld), victim);
       }},
      {"receive",
       [](const Group& g, int victim) {
         return g.rank() == victim ? g.started().send(rows(kRows), (victim + 1) % kWorld)
                                   : g.started().receive(rows(kRows), victim);
       }},
      {"exchange",
       [](const Group& g, int) {
         std::vector<Message> messages;
         for (int peer = 0; peer < kWorld; ++peer) {
           if (peer == g.rank()) continue;
           messages.push_back({Message::Kind::receive, rows(kRows), peer});
           messages.push_back({Message::Kind::send, rows(kRows), peer});
         }
         return g.started().exchange(messages);
       }},
      {"barrier", [](const Group& g, int) { return g.started().barrier(); }},
  };
  return all;
}

enum class Fault { kill_before, kill_inside, stop, exception, abort, exit };

struct Case {
  int operation;
  Fault fault;
  int victim;
  const char* backend;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << operations()[c.operation].name << " fault " << static_cast<int>(c.fault) << " victim "
       << c.victim << " over " << c.backend;
}

/// "kind|ranks|milliseconds|message" of the error that the call gave.
std::string report_of(const Group& group, const Operation& operation, int victim) {
  const auto begin = steady_clock::now();
  auto describe = [&](const char* kind, const std::vector<int>& ranks, const char* what) {
    return concat(kind, "|", list(ranks), "|",
                  std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin).count(),
                  "|", what);
  };
  try {
    // Ranks that only send may finish a call without the victim; they hear of it by the next one.
    while (steady_clock::now() - begin < 50s) operation.start(group, victim).wait();
  } catch (const PeerLostError& error) {
    return describe("lost", error.ranks(), error.what());
  } catch (const TimeoutError& error) {
    return describe("timeout", error.missing(), error.what());
  } catch (const Error& error) {
    return describe("other", {}, error.what());
  }
  return "none||0|";
}

std::string run_rank(const Case& c, const Launch& launch) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = 60s;
  options.rendezvous_timeout = 30s;
  const bool hosts = std::string_view(c.backend) == "hosts";
  if (!hosts) options.backend = c.backend;
  std::string report;
  try {
    // Two ranks on one host, and rank 2 on another.
    auto manager = hosts ? testing::manager_on_host(launch, launch.rank / 2, options)
                         : DistributedManager::initialize(options);
    Group world = manager.world();
    if (world.backend() != c.backend) return concat("over ", world.backend());
    const Operation& operation = operations()[c.operation];
    world.barrier();
    // The fault comes once all have left the barrier: who is still in it would fail there.
    const auto store = manager.state()->base().store->clone();
    if (store->add("through", 1) == kWorld) store->set("all through", "1");
    if (launch.rank == c.victim) store->wait({"all through"});
    // A rank that only sends may be a call ahead of the root, and would say that it misses the
    // root: its own limit does not run out first.
    const bool only_sends = (std::string_view(operation.name) == "gather" ||
                             std::string_view(operation.name) == "reduce") &&
                            launch.rank != (c.victim + 1) % kWorld;
    if (c.fault == Fault::stop) world.set_timeout(only_sends ? 6s : 1500ms);
    if (launch.rank != c.victim) return report_of(world, operation, c.victim);
    switch (c.fault) {
      case Fault::kill_before:
        ::raise(SIGKILL);
        break;
      case Fault::kill_inside: {
        const Request request = operation.start(world, c.victim);
        ::raise(SIGKILL);
        break;
      }
      case Fault::stop:
        ::raise(SIGSTOP);
        break;
      case Fault::exception:
        throw std::runtime_error("the disk is full");
      case Fault::abort:
        world.abort("the disk is full");
        break;
      case Fault::exit:
        break;
    }
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != "the disk is full") throw;
    report = "threw";
  }
  return report;
}

class Faults : public ::testing::TestWithParam<Case> {};

TEST_P(Faults, SurvivorsThrowInTimeAndEnd) {
  const Case c = GetParam();
  const Operation& operation = operations()[c.operation];
  std::vector<bool> wait_for(kWorld, true);
  if (c.fault == Fault::stop) wait_for[c.victim] = false;
  const auto ends = testing::fork_ranks(
      kWorld, [&](const Launch& launch) { return run_rank(c, launch); }, 50s, wait_for);
  for (int rank = 0; rank < kWorld; ++rank) {
    const auto& end = ends[rank];
    if (rank == c.victim) {
      if (c.fault == Fault::exception || c.fault == Fault::abort || c.fault == Fault::exit) {
        EXPECT_EQ(end.exit_code, 0)
            << "rank " << rank << " signal " << end.signal << " " << end.report;
      }
      continue;
    }
    ASSERT_TRUE(end.ended) << "rank " << rank << " hung";
    EXPECT_EQ(end.exit_code, 0) << "rank " << rank << " signal " << end.signal << ": "
                                << end.report;
    std::istringstream in(end.report);
    std::string kind, ranks, took, message;
    std::getline(in, kind, '|');
    std::getline(in, ranks, '|');
    std::getline(in, took, '|');
    std::getline(in, message, '\0');
    EXPECT_EQ(kind, c.fault == Fault::stop ? "timeout" : "lost") << end.report;
    EXPECT_EQ(ranks, concat("[", c.victim, "]")) << end.report;
    // Shared memory has no buffer in which a message could wait, and no other process between.
    const int most = c.fault == Fault::stop                 ? 12000
                     : std::string_view(c.backend) == "shm" ? 4000
                                                            : 10000;
    EXPECT_LT(std::atoi(took.c_str()), most) << end.report;
    EXPECT_NE(message.find(operation.name), std::string::npos) << end.report;
    const char* reason = c.fault == Fault::abort  ? "the disk is full"
                         : c.fault == Fault::stop ? "does not answer"
                                                  : "";
    EXPECT_NE(message.find(reason), std::string::npos) << end.report;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* backend : {"gloo", "shm"}) {
    for (int i = 0; i < static_cast<int>(operations().size()); ++i) {
      all.push_back({i, i % 2 ? Fault::kill_before : Fault::kill_inside, 2, backend});
      all.push_back({i, Fault::stop, 1, backend});
      all.push_back({i, i % 2 ? Fault::exception : Fault::abort, 2, backend});
    }
    // Rank 0 also serves the store.
    for (const Fault fault : {Fault::kill_inside, Fault::kill_before, Fault::stop, Fault::exception,
                              Fault::abort, Fault::exit})
      all.push_back({1, fault, 0, backend});
    all.push_back({1, Fault::exit, 2, backend});
  }
  for (int i = 0; i < static_cast<int>(operations().size()); ++i)
    all.push_back({i, i % 2 ? Fault::kill_before : Fault::kill_inside, 1 + i % 2, "hosts"});
  for (const int victim : {0, 1, 2})
    all.push_back({6, victim == 1 ? Fault::abort : Fault::exception, victim, "hosts"});
  for (const int victim : {0, 1}) all.push_back({1, Fault::stop, victim, "hosts"});
  all.push_back({9, Fault::stop, 2, "hosts"});
  all.push_back({1, Fault::exit, 2, "hosts"});
  return all;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  static const char* const faults[] = {"KillBefore", "KillInside", "Stop",
                                       "Exception",  "Abort",      "Exit"};
  return concat(info.index, "_", operations()[info.param.operation].name, "_",
                faults[static_cast<int>(info.param.fault)], "_", info.param.victim, "_",
                info.param.backend);
}

INSTANTIATE_TEST_SUITE_P(EveryCall, Faults, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace tessera
