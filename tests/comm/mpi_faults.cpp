// One fault a run: the argument says which. What each rank prints, and how the job ends, is checked
// by ctest.

#include <ATen/Parallel.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "mpi_support.h"
#include "tessera/base/hash.h"
#include "tessera/comm/backends/mpi/mpi_work.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/mpi_interop.h"

using namespace std::chrono_literals;

namespace tessera::test {
void run_host_fault(const MpiWorld& world, const std::string& fault);
}

namespace {

using tessera::MpiWorld;

void say(const MpiWorld& world, const std::string& text) {
  std::printf("rank %d: %s\n", world.rank(), text.c_str());
  std::fflush(stdout);
}

/// Runs until the launcher ends this process.
[[noreturn]] void stay_away() {
  for (;;) pause();
}

template <class Call>
void expect_timeout(const MpiWorld& world, const char* what, Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  try {
    call();
    say(world, std::string(what) + ": no error");
  } catch (const tessera::TimeoutError& e) {
    const auto waited = std::chrono::steady_clock::now() - start;
    std::string missing;
    for (const int r : e.missing()) missing += " " + std::to_string(r);
    say(world, std::string(what) + ": TimeoutError after " +
                   (waited < 5s ? "the limit" : "too long") + ", missing" + missing + ": " +
                   e.what());
  }
}

/// In each round a rank, in turns the first one of the group, comes when all others have tried in
/// vain, each as often and for as long as it is drawn; then all make the group.
void run_many_tries(const MpiWorld& world) {
  std::mt19937 drawn(7);
  const auto comm = tessera::test::context_of(world)->comm();
  const int rounds = 12;
  for (int round = 0; round < rounds; ++round) {
    auto ranks = tessera::test::all_ranks(world);
    std::rotate(ranks.begin(), ranks.begin() + round % world.size(), ranks.end());
    const int absent = static_cast<int>(drawn() % ranks.size());
    int word = 0;
    tessera::MpiBackendOptions o;
    for (const int r : ranks) {
      // The same numbers on all ranks.
      const auto tries = 1 + drawn() % 3;
      for (std::size_t i = 0; i < tries; ++i) {
        o.timeout = std::chrono::milliseconds(1 + drawn() % 20);
        if (r != world.rank() || r == absent) continue;
        try {
          tessera::make_mpi_backend(world, ranks, o);
          say(world, "made without rank " + std::to_string(absent));
        } catch (const tessera::TimeoutError&) {
        }
      }
    }
    if (world.rank() != absent) MPI_Send(&word, 1, MPI_INT, absent, 32767, comm);
    for (int i = 0; world.rank() == absent && i < world.size() - 1; ++i)
      MPI_Recv(&word, 1, MPI_INT, MPI_ANY_SOURCE, 32767, comm, MPI_STATUS_IGNORE);
    o.timeout = 30s;
    tessera::make_mpi_backend(world, ranks, o)->barrier(c10d::BarrierOptions())->wait();
  }
  say(world, "so do " + std::to_string(rounds) + " rounds of many tries");
}

void run(const MpiWorld& world, const std::string& fault) {
  using tessera::CommError, tessera::MpiBackendOptions, tessera::PeerLostError,
      tessera::TimeoutError;
  namespace detail = tessera::detail;
  namespace test = tessera::test;
  const int last = world.size() - 1;
  if (fault.starts_with("hosts_")) return test::run_host_fault(world, fault);
  const auto options = [](bool blocking) {
    c10d::AllreduceOptions o;
    o.asyncOp = !blocking;
    o.timeout = 500ms;
    return o;
  };
  if (fault == "group_timeout") {
    if (world.rank() == last) stay_away();
    MpiBackendOptions o;
    o.name = "all";
    o.timeout = 500ms;
    expect_timeout(world, "group",
                   [&] { tessera::make_mpi_backend(world, test::all_ranks(world), o); });
    return;
  }
  if (fault == "communicator") {
    if (world.rank() == last) stay_away();
    expect_timeout(world, "communicator", [] { tessera::mpi_world(MPI_COMM_WORLD, 500ms); });
    std::_Exit(2);  // MPI has a request that nothing ends
  }
  std::vector<at::Tensor> t{at::ones({3})};
  if (fault == "started_aborted" || fault == "started_late") {
    // Calls of a manager's group: a started one tells why it ended, as a blocking one does.
    const auto manager = tessera::DistributedManager::initialize({.mpi = world});
    auto all = manager.world();
    if (world.rank() == last) stay_away();
    auto request = all.started().all_reduce(t[0], tessera::ReduceOp::sum,
                                            {.timeout = fault == "started_late" ? 500ms : 30000ms});
    std::jthread other([&] {
      std::this_thread::sleep_for(200ms);
      if (fault == "started_aborted") all.abort("the pump stands still");
    });
    try {
      request.wait();
    } catch (const PeerLostError& e) {
      say(world, std::string("PeerLostError: ") + e.what());
    } catch (const TimeoutError& e) {
      say(world, std::string("TimeoutError: ") + e.what());
    }
    return;
  }
  if (fault == "making") {
    // The last rank fails while the others make a group of all; then all of them make it.
    const auto manager =
        tessera::DistributedManager::initialize({.backend = "mpi", .timeout = 30s});
    manager.world().barrier();
    // The fault comes once all have left the barrier: who is still in it would fail there.
    const auto store = manager.state()->base().store->clone();
    if (store->add("through", 1) == world.size()) store->set("all through", "1");
    if (world.rank() == last) store->wait({"all through"});
    const tessera::Mesh all({{"all", world.size()}});
    std::vector<int> backwards = test::all_ranks(world);
    std::ranges::reverse(backwards);
    const auto start = std::chrono::steady_clock::now();
    try {
      if (world.rank() == last)
        manager.fail_groups_within(all, "no more paper");
      else
        manager.group(backwards).barrier();
      if (world.rank() != last) say(world, "no error");
    } catch (const tessera::PeerFailedError& e) {
      const bool late = std::chrono::steady_clock::now() - start > 20s;
      say(world, std::string("PeerFailedError") + (late ? " late: " : ": ") + e.what());
    }
    manager.group(backwards).all_reduce(t[0]);
    if (t[0].eq(world.size()).all().item<bool>()) say(world, "the next one works");
    return;
  }
  if (fault == "retried") {
    // The last rank comes when the others have waited in vain; then all make the group. Of three
    // ranks the second one reports once more while the first one is still in its first try.
    const auto ranks = test::all_ranks(world);
    const auto comm = tessera::test::context_of(world)->comm();
    int word = 0;
    MpiBackendOptions o;
    o.timeout = world.rank() == 0 ? 2000ms : 150ms;
    if (world.rank() != last) {
      expect_timeout(world, "first", [&] { tessera::make_mpi_backend(world, ranks, o); });
      MPI_Send(&word, 1, MPI_INT, last, 32767, comm);
    }
    for (int r = 0; world.rank() == last && r < last; ++r)
      MPI_Recv(&word, 1, MPI_INT, r, 32767, comm, MPI_STATUS_IGNORE);
    o.timeout = 30s;
    const auto group = tessera::make_mpi_backend(world, ranks, o);
    auto sum = options(true);
    sum.timeout = 30s;
    group->allreduce(t, sum)->wait();
    if (t[0].eq(world.size()).all().item<bool>()) say(world, "the second try works");
    group->barrier(c10d::BarrierOptions())->wait();
    run_many_tries(world);
    return;
  }
  MpiBackendOptions short_end;
  short_end.timeout = 1500ms;
  const auto group = fault == "end"
                         ? tessera::make_mpi_backend(world, test::all_ranks(world), short_end)
                         : test::backend(world, test::all_ranks(world));
  if (fault == "fatal") {
    if (world.rank() == last) world.fatal("the mesh has 3 holes");
    group->allreduce(t, c10d::AllreduceOptions())->wait();
  } else if (fault == "throws") {
    if (world.rank() == last) throw std::runtime_error("no more fuel");
    group->allreduce(t, c10d::AllreduceOptions())->wait();
  } else if (fault == "killed") {
    // It dies when the other is about to wait for it: mpirun's words alone would come anyhow.
    std::vector<at::Tensor> word{at::ones({1})};
    if (world.rank() == last) {
      group->recv(word, 0, 0)->wait();
      raise(SIGKILL);
    }
    say(world, "waits for a rank that dies");
    group->send(word, last, 0)->wait();
    group->allreduce(t, c10d::AllreduceOptions())->wait();
    std::abort();  // the call went on without that rank
  } else if (fault == "late_blocking" || fault == "late_started") {
    if (world.rank() == last) stay_away();
    expect_timeout(world, "all_reduce",
                   [&] { group->allreduce(t, options(fault == "late_blocking"))->wait(); });
    try {
      group->allreduce(t, options(true));
    } catch (const TimeoutError&) {
      say(world, "second call waited again");
    } catch (const CommError& e) {
      say(world, std::string("second call: CommError: ") + e.what());
    }
  } else if (fault == "late_receive") {
    if (world.rank() == last) stay_away();
    expect_timeout(world, "receive", [&] { group->recv(t, last, 0)->wait(500ms); });
  } else if (fault == "stopped_inside") {
    // The last rank meets the others, as a blocking call does, and then stops: the others are
    // inside MPI's own blocking call.
    auto long_enough = options(true);
    long_enough.timeout = 2500ms;
    MpiBackendOptions o;
    const auto comm = detail::make_mpi_comm(test::context_of(world), test::all_ranks(world), o);
    const auto inner = std::make_shared<detail::MpiTransport>(comm, o)->backend();
    if (world.rank() == last) {
      detail::MpiCall call;
      call.name = "all_reduce";
      call.timeout = 30s;
      call.card.operation = "all_reduce";
      call.card.dtype = at::kFloat;
      call.card.op = 0;
      call.card.elements = 3;
      call.hash = tessera::Hash().number(0).number(call.card.hash()).value();
      comm->meet(call);
      stay_away();
    }
    inner->allreduce(t, long_enough);
  } else if (fault == "abort") {
    // Another thread ends a wait that would last, or is about to begin.
    if (world.rank() == last) stay_away();
    const auto work = group->allreduce(t, c10d::AllreduceOptions());
    std::jthread other([&] {
      std::this_thread::sleep_for(200ms);
      group->abort();
    });
    try {
      work->wait();
    } catch (const PeerLostError& e) {
      say(world, std::string("PeerLostError: ") + e.what());
    }
  } else if (fault == "sizes") {
    std::vector<at::Tensor> mine{at::ones({world.rank() == last ? 2 : 3})};
    try {
      if (world.rank() == last) group->send(mine, 0, 0)->wait();
      if (world.rank() == 0) group->recv(mine, last, 0)->wait();
    } catch (const CommError& e) {
      say(world, std::string("CommError: ") + e.what());
    }
    group->barrier(c10d::BarrierOptions())->wait();
    say(world, "the group still works");
  } else if (fault == "counts_blocking" || fault == "counts_started") {
    // Other counts, another dtype, another operation: a blocking call compares before data moves.
    const bool blocking = fault == "counts_blocking";
    const bool odd = world.rank() == last;
    const auto meets = [&](const char* what, auto&& call) {
      try {
        call();
        say(world, std::string(what) + ": no error");
      } catch (const tessera::MismatchError& e) {
        say(world, std::string(what) + ": MismatchError: " + e.what());
      }
    };
    auto o = options(blocking);
    o.timeout = 20s;
    for (const std::int64_t n : {100000, 1000000})
      meets("counts", [&] {
        std::vector<at::Tensor> mine{at::ones({odd ? 10 : n})};
        group->allreduce(mine, o)->wait();
      });
    meets("dtypes", [&] {
      std::vector<at::Tensor> mine{at::ones({4}, odd ? at::kInt : at::kFloat)};
      group->allreduce(mine, o)->wait();
    });
    meets("operations", [&] {
      c10d::BroadcastOptions other;
      other.asyncOp = !blocking;
      if (odd)
        group->broadcast(t, other)->wait();
      else
        group->allreduce(t, o)->wait();
    });
    meets("reductions", [&] {
      c10d::ReduceScatterOptions other;
      other.asyncOp = !blocking;
      other.reduceOp = odd ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
      at::Tensor whole = at::ones({2 * world.size()}), share = at::empty({2});
      group->_reduce_scatter_base(share, whole, other)->wait();
    });
    group->barrier(c10d::BarrierOptions())->wait();
    group->allreduce(t, o)->wait();
    if (t[0][0].item<float>() == static_cast<float>(world.size()))
      say(world, "the group still works");
  } else if (fault == "mixed") {
    // A rank that waits at once meets one that does not.
    group->allreduce(t, options(world.rank() == last))->wait();
    say(world, t[0][0].item<float>() == static_cast<float>(world.size()) ? "right" : "wrong");
  } else if (fault == "short_limit") {
    // Shorter than the transfer: an error, not the end of the job.
    std::vector<at::Tensor> large{at::ones({1 << 26})};
    auto o = options(true);
    o.timeout = 5ms;
    expect_timeout(world, "all_reduce", [&] { group->allreduce(large, o)->wait(); });
  } else if (fault == "dtype") {
    const auto all = tessera::DistributedManager::initialize({.timeout = 20s, .mpi = world});
    const auto world_group = all.world();
    try {
      if (world.rank() == last) world_group.send(at::ones({1 << 20}, at::kInt), 0);
      if (world.rank() == 0) world_group.receive(at::ones({1 << 20}), last);
      say(world, "no error");
    } catch (const tessera::MismatchError& e) {
      say(world, std::string("MismatchError: ") + e.what());
    }
  } else if (fault == "message_sizes" || fault == "all_to_all_sizes") {
    // A message that is longer than its receive, and than what MPI keeps for it.
    const auto all = tessera::DistributedManager::initialize({.timeout = 20s, .mpi = world});
    const auto world_group = all.world();
    const bool odd = world.rank() == last;
    const auto memory = at::zeros({1 << 21});
    const auto n = static_cast<std::size_t>(world.size());
    try {
      if (fault == "all_to_all_sizes") {
        const tessera::Sizes mine(n, odd ? 1 << 18 : 10);
        const auto output = memory.narrow(0, 0, static_cast<std::int64_t>(n) * mine[0]);
        world_group.all_to_all(output, at::ones_like(output), mine, mine);
      } else if (odd) {
        world_group.send(at::ones({1 << 20}), 0);
      } else if (world.rank() == 0) {
        world_group.receive(memory.narrow(0, 0, 10), last);
      }
      say(world, "no error");
    } catch (const tessera::MismatchError& e) {
      say(world, std::string("MismatchError: ") + e.what());
    }
    const auto own = static_cast<std::int64_t>(n) * (odd ? 1 << 18 : 10);
    if (memory.narrow(0, own, (1 << 21) - own).eq(0).all().item<bool>()) say(world, "memory kept");
  } else if (fault == "rooted") {
    // Rooted calls and all-to-alls that do not belong together: what one rank sent for its call is
    // never taken for the data of another.
    const auto all = tessera::DistributedManager::initialize({.timeout = 20s, .mpi = world});
    const auto world_group = all.world();
    const bool odd = world.rank() == last;
    const auto n = static_cast<std::int64_t>(world.size());
    const auto meets = [&](const char* what, auto&& call) {
      try {
        call();
        say(world, std::string(what) + ": no error");
      } catch (const tessera::MismatchError& e) {
        say(world, std::string(what) + ": MismatchError: " + e.what());
      }
    };
    meets("gather or scatter", [&] {
      const auto whole = at::zeros({2 * n}), part = at::ones({2});
      odd ? world_group.gather(whole, part, 0) : world_group.scatter(part, whole, 0);
    });
    meets("dtype of a gather", [&] {
      const auto dtype = odd ? at::kInt : at::kFloat;
      world_group.gather(at::zeros({2 * n}, dtype), at::ones({2}, dtype), 0);
    });
    meets("all_to_all", [&] {
      const auto dtype = odd ? at::kInt : at::kFloat;
      world_group.all_to_all(at::zeros({2 * n}, dtype), at::ones({2 * n}, dtype));
    });
    meets("all_to_all with sizes", [&] {
      const tessera::Sizes sizes(static_cast<std::size_t>(n), 1);
      if (odd)
        world_group.all_reduce(at::ones({n}));
      else
        world_group.all_to_all(at::zeros({n}), at::ones({n}), sizes, sizes);
    });
    // The same by c10d's own calls.
    const auto backend = world_group.process_group()->getBackend(c10::DeviceType::CPU);
    meets("c10d", [&] {
      std::vector<at::Tensor> one{at::ones({2})};
      std::vector<std::vector<at::Tensor>> each(
          1, std::vector<at::Tensor>(static_cast<std::size_t>(n), at::zeros({2}))),
          none;
      c10d::GatherOptions gathers;
      gathers.asyncOp = false;
      c10d::ScatterOptions scatters;
      scatters.asyncOp = false;
      if (odd)
        backend->gather(none, one, gathers);
      else
        backend->scatter(one, each, scatters);
    });
    const auto part = at::full({1}, world.rank() + 5.0);
    const auto whole = world.rank() == 0 ? at::zeros({n}) : at::Tensor();
    world_group.gather(whole, part, 0);
    if (world.rank() != 0 || whole[n - 1].item<double>() == n + 4.0)
      say(world, "the group still works");
  } else if (fault == "other_group") {
    // The hello of another list under the same tag.
    const auto comm = tessera::test::context_of(world)->comm();
    const std::vector<int> ranks = test::all_ranks(world);
    if (world.rank() == last) {
      tessera::Hash hash;
      for (const int r : ranks) hash.number(static_cast<std::uint64_t>(r));
      const std::uint64_t other[] = {12345 * 8 + 1, 1, 0, 0};
      MPI_Send(other, 4, MPI_UINT64_T, 0, static_cast<int>(hash.value() % 32767), comm);
      return;
    }
    MpiBackendOptions o;
    o.timeout = 5s;
    try {
      tessera::make_mpi_backend(world, ranks, o);
    } catch (const tessera::MismatchError& e) {
      say(world, std::string("MismatchError: ") + e.what());
    } catch (const TimeoutError& e) {
      say(world, std::string("TimeoutError: ") + e.what());
    }
    std::fflush(stdout);
    std::_Exit(0);
  } else if (fault == "end") {
    // The last rank does not come to the end.
    if (world.rank() == last) stay_away();
  } else {
    std::fprintf(stderr, "unknown fault %s\n", fault.c_str());
    std::exit(3);
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string fault = argc > 1 ? argv[1] : "";
  try {
    // A group over several hosts calls MPI from a thread of its own.
    const bool threads = fault.starts_with("hosts_");
    const MpiWorld world = MpiWorld::initialize(threads ? tessera::MpiThreadLevel::serialized
                                                        : tessera::MpiThreadLevel::funneled);
    run(world, fault);
  } catch (const std::exception& e) {
    std::printf("ended by: %s\n", e.what());
    return 2;
  }
  return 0;
}
