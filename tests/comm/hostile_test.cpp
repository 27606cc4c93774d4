// Drawn calls of two to four ranks, small and large, blocking and started, waited for in any order,
// in memory, over Gloo and over hosts: right to the last bit; and where one rank is killed between
// any two of them, the others are told in time, and told which.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "../support/hostile.h"
#include "fork_ranks.h"
#include "on_hosts.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using testing::Draws;
using testing::for_seeds;

enum class Kind {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  exchange,
  barrier
};

struct Call {
  Kind kind;
  std::int64_t rows;
  int root;
  bool started;
  // How many of the calls in progress are waited for after it.
  int waits;
};

struct Plan {
  std::string backend;
  int ranks = 2;
  std::vector<Call> calls;
  // Below 0: nobody dies.
  int victim = -1, at = 0;
  bool inside = false;
};

Plan draw_plan(std::uint64_t seed) {
  Draws draw(seed);
  Plan plan;
  plan.backend = draw.of<std::string>({"shm", "shm", "gloo", "hosts"});
  plan.ranks = plan.backend == "hosts" ? draw.between(3, 4) : draw.between(2, 4);
  for (int n = draw.between(5, 40); n > 0; --n) {
    Call call;
    call.kind = static_cast<Kind>(draw.below(9));
    call.rows = draw.chance(25) ? draw.between(20000, 60000) : draw.between(0, 300);
    call.root = draw.below(plan.ranks);
    call.started = draw.chance(60);
    call.waits = draw.below(4);
    plan.calls.push_back(call);
  }
  if (draw.chance(60)) plan.victim = draw.below(plan.ranks);
  plan.at = draw.below(static_cast<int>(plan.calls.size()));
  plan.inside = draw.chance(50);
  return plan;
}

at::Tensor filled(std::int64_t rows, double value) { return at::full({rows}, value, at::kDouble); }

bool is(const at::Tensor& t, double value) { return t.eq(value).all().item<bool>(); }

// Rows that a rank gives another, the same whoever asks.
std::int64_t rows_between(const Call& call, int from, int to) {
  return (from * 2 + to + call.rows) % 3 == 0 ? 0 : call.rows + from + to;
}

// Makes the call, and says how to see that its result is right.
template <class Calls>
auto make(const Calls& calls, const Call& call, int rank, int ranks, std::function<bool()>& right) {
  const double sum = ranks * (ranks + 1) / 2.0, mine = rank + 1;
  const auto n = call.rows;
  right = [] { return true; };
  switch (call.kind) {
    case Kind::all_reduce: {
      const at::Tensor t = filled(n, mine);
      right = [=] { return is(t, sum); };
      return calls.all_reduce(t);
    }
    case Kind::broadcast: {
      const at::Tensor t = filled(n, rank == call.root ? 7.5 : -1);
      right = [=] { return is(t, 7.5); };
      return calls.broadcast(t, call.root);
    }
    case Kind::all_gather: {
      Sizes sizes;
      std::int64_t all = 0;
      for (int r = 0; r < ranks; ++r) all += sizes.emplace_back(rows_between(call, r, 0));
      const at::Tensor out = filled(all, -1);
      right = [=] {
        std::int64_t at = 0;
        for (int r = 0; r < ranks; ++r) {
          if (!is(out.narrow(0, at, sizes[r]), r + 1)) return false;
          at += sizes[r];
        }
        return true;
      };
      return calls.all_gather(out, filled(sizes[rank], mine), sizes);
    }
    case Kind::reduce_scatter: {
      const at::Tensor out = filled(n, -1);
      right = [=] { return is(out, sum); };
      return calls.reduce_scatter(out, filled(n * ranks, mine));
    }
    case Kind::all_to_all: {
      Sizes to, from;
      std::int64_t sent = 0, got = 0;
      for (int r = 0; r < ranks; ++r) {
        sent += to.emplace_back(rows_between(call, rank, r));
        got += from.emplace_back(rows_between(call, r, rank));
      }
      const at::Tensor out = filled(got, -1);
      right = [=] {
        std::int64_t at = 0;
        for (int r = 0; r < ranks; ++r) {
          if (!is(out.narrow(0, at, from[r]), r + 1)) return false;
          at += from[r];
        }
        return true;
      };
      return calls.all_to_all(out, filled(sent, mine), from, to);
    }
    case Kind::gather: {
      const bool root = rank == call.root;
      const at::Tensor out = root ? filled(n * ranks, -1) : at::Tensor();
      if (root)
        right = [=] {
          for (int r = 0; r < ranks; ++r)
            if (!is(out.narrow(0, r * n, n), r + 1)) return false;
          return true;
        };
      return calls.gather(out, filled(n, mine), call.root);
    }
    case Kind::scatter: {
      at::Tensor in;
      if (rank == call.root) {
        in = filled(n * ranks, 0);
        for (int r = 0; r < ranks; ++r) in.narrow(0, r * n, n).fill_(r + 1.5);
      }
      const at::Tensor out = filled(n, -1);
      right = [=] { return is(out, rank + 1.5); };
      return calls.scatter(out, in, call.root);
    }
    case Kind::exchange: {
      const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
      const at::Tensor out = filled(n, -1);
      right = [=] { return is(out, before + 1); };
      return calls.exchange(
          {{Message::Kind::receive, out, before}, {Message::Kind::send, filled(n, mine), next}});
    }
    default:
      return calls.barrier();
  }
}

// "good", or how this rank was told that another one died, and how long after its last success.
std::string run_rank(const Plan& plan, const Launch& launch) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = 30s;
  options.rendezvous_timeout = 30s;
  const bool hosts = plan.backend == "hosts";
  if (!hosts) options.backend = plan.backend;
  auto manager = hosts ? testing::manager_on_host(launch, launch.rank / 2, options)
                       : DistributedManager::initialize(options);
  const Group world = manager.world();
  struct Started {
    std::size_t number;
    Request request;
    std::function<bool()> right;
  };
  std::deque<Started> started;
  const int rank = world.rank(), ranks = world.size();
  auto last = steady_clock::now();
  try {
    // A rank may still be in it when another one has left it, and dies.
    world.barrier();
    const auto finish = [&](std::size_t at) -> std::string {
      Started one = std::move(started[at]);
      started.erase(started.begin() + static_cast<std::ptrdiff_t>(at));
      last = steady_clock::now();
      one.request.wait();
      return one.right() ? "" : concat("call ", one.number, " is wrong");
    };
    for (std::size_t k = 0; k < plan.calls.size(); ++k) {
      const Call& call = plan.calls[k];
      const bool dies = rank == plan.victim && static_cast<int>(k) == plan.at;
      if (dies && !plan.inside) ::raise(SIGKILL);
      std::function<bool()> right;
      last = steady_clock::now();
      if (call.started || dies) {
        Request request = make(world.started(), call, rank, ranks, right);
        if (dies) ::raise(SIGKILL);
        started.push_back({k, std::move(request), right});
      } else {
        make(static_cast<const Collectives<void>&>(world), call, rank, ranks, right);
        if (!right()) return concat("call ", k, " is wrong");
      }
      for (int w = 0; w < call.waits && !started.empty(); ++w) {
        const std::string wrong = finish((k + static_cast<std::size_t>(w)) % started.size());
        if (!wrong.empty()) return wrong;
      }
    }
    while (!started.empty()) {
      const std::string wrong = finish(started.size() - 1);
      if (!wrong.empty()) return wrong;
    }
    last = steady_clock::now();
    world.barrier();
    return "good";
  } catch (const PeerLostError& error) {
    const auto took =
        std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - last);
    return concat("lost ", list(error.ranks()), took < 10s ? "" : " too late", ": ", error.what());
  } catch (const std::exception& error) {
    return concat("other: ", error.what());
  }
}

}  // namespace

TEST(HostileCalls, AreRightOrEndByTheNameOfWhoDied) {
  for_seeds({}, 8, [](std::uint64_t seed) {
    const Plan plan = draw_plan(seed);
    const auto ends = testing::fork_ranks(
        plan.ranks, [&](const Launch& launch) { return run_rank(plan, launch); }, 60s);
    for (int r = 0; r < plan.ranks; ++r) {
      const auto& end = ends[static_cast<std::size_t>(r)];
      if (r == plan.victim) continue;
      EXPECT_TRUE(end.ended) << "rank " << r << " of " << plan.ranks << " hung over "
                             << plan.backend;
      const std::string wanted = plan.victim < 0 ? "good" : concat("lost [", plan.victim, "]: ");
      EXPECT_EQ(end.report.substr(0, wanted.size()), wanted)
          << "rank " << r << " over " << plan.backend << ", signal " << end.signal << ": "
          << end.report;
    }
  });
}

}  // namespace tessera
