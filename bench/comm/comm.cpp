// Latency and bandwidth of each collective through Group, beside the bare library, on two ranks: MPI beside MPI's own calls, Gloo beside c10d's Gloo
// backend called directly. Blocking calls; checks and trace off. Ours may add 5 us or 3 %, whichever is larger.

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#ifdef TESSERA_BENCH_MPI
#include <mpi.h>
#endif

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/gloo.h"
#include "tessera/comm/manager.h"
#include "tessera/comm/mpi.h"

namespace {

using tessera::Group;
using tessera::bench::Report;
using Clock = std::chrono::steady_clock;

constexpr double kAddedSeconds = 5e-6;
constexpr double kAddedShare = 0.03;
constexpr int kPairs = 41;

/// The same call in both ways, on memory of its own. `floats` is the number of elements that one rank holds.
struct Case {
  std::string operation;
  std::string reference;
  std::function<void()> ours;
  std::function<void()> bare;
};

struct Buffers {
  at::Tensor one, many, other;  ///< [n], [ranks * n], [ranks * n]
};

Buffers buffers(const Group& group, std::int64_t floats) {
  return {at::zeros({floats}), at::zeros({floats * group.size()}), at::zeros({floats * group.size()})};
}

#ifdef TESSERA_BENCH_MPI
std::vector<Case> mpi_cases(const Group& group, const Buffers& b, std::int64_t floats) {
  const int n = static_cast<int>(floats), me = group.rank(), peer = 1 - me;
  float *one = b.one.data_ptr<float>(), *many = b.many.data_ptr<float>(), *other = b.other.data_ptr<float>();
  const MPI_Comm comm = MPI_COMM_WORLD;
  return {
      {"all_reduce", "MPI_Allreduce", [=] { group.all_reduce(b.one); }, [=] { MPI_Allreduce(MPI_IN_PLACE, one, n, MPI_FLOAT, MPI_SUM, comm); }},
      {"broadcast", "MPI_Bcast", [=] { group.broadcast(b.one, 0); }, [=] { MPI_Bcast(one, n, MPI_FLOAT, 0, comm); }},
      {"reduce", "MPI_Reduce", [=] { group.reduce(b.one, 0); },
       [=] { MPI_Reduce(me == 0 ? MPI_IN_PLACE : one, me == 0 ? one : nullptr, n, MPI_FLOAT, MPI_SUM, 0, comm); }},
      {"all_gather", "MPI_Allgather", [=] { group.all_gather(b.many, b.one); }, [=] { MPI_Allgather(one, n, MPI_FLOAT, many, n, MPI_FLOAT, comm); }},
      {"reduce_scatter", "MPI_Reduce_scatter_block", [=] { group.reduce_scatter(b.one, b.many); },
       [=] { MPI_Reduce_scatter_block(many, one, n, MPI_FLOAT, MPI_SUM, comm); }},
      {"all_to_all", "MPI_Alltoall", [=] { group.all_to_all(b.other, b.many); },
       [=] { MPI_Alltoall(many, n, MPI_FLOAT, other, n, MPI_FLOAT, comm); }},
      {"gather", "MPI_Gather", [=] { group.gather(b.many, b.one, 0); }, [=] { MPI_Gather(one, n, MPI_FLOAT, many, n, MPI_FLOAT, 0, comm); }},
      {"scatter", "MPI_Scatter", [=] { group.scatter(b.one, b.many, 0); }, [=] { MPI_Scatter(many, n, MPI_FLOAT, one, n, MPI_FLOAT, 0, comm); }},
      {"send_receive", "MPI_Send, MPI_Recv",
       [=] {
         if (me == 0) {
           group.send(b.one, peer);
           group.receive(b.one, peer);
         } else {
           group.receive(b.one, peer);
           group.send(b.one, peer);
         }
       },
       [=] {
         if (me == 0) {
           MPI_Send(one, n, MPI_FLOAT, peer, 0, comm);
           MPI_Recv(one, n, MPI_FLOAT, peer, 0, comm, MPI_STATUS_IGNORE);
         } else {
           MPI_Recv(one, n, MPI_FLOAT, peer, 0, comm, MPI_STATUS_IGNORE);
           MPI_Send(one, n, MPI_FLOAT, peer, 0, comm);
         }
       }},
  };
}
#endif

std::vector<Case> gloo_cases(const Group& group, const c10::intrusive_ptr<c10d::Backend>& bare, const Buffers& b, std::int64_t floats) {
  const int me = group.rank(), peer = 1 - me;
  using Tensors = std::vector<at::Tensor>;
  const auto list = [](const at::Tensor& t) { return Tensors{t}; };
  const Tensors parts = b.many.split(floats);
  const auto c10d_op = [&](std::string operation, std::function<void()> ours, std::function<c10::intrusive_ptr<c10d::Work>()> call) {
    return Case{operation, "c10d Gloo", std::move(ours), [call = std::move(call)] { call()->wait(); }};
  };
  return {
      c10d_op(
          "all_reduce", [=] { group.all_reduce(b.one); },
          [=] {
            auto t = list(b.one);
            return bare->allreduce(t, c10d::AllreduceOptions());
          }),
      c10d_op(
          "broadcast", [=] { group.broadcast(b.one, 0); },
          [=] {
            auto t = list(b.one);
            return bare->broadcast(t, c10d::BroadcastOptions());
          }),
      c10d_op(
          "reduce", [=] { group.reduce(b.one, 0); },
          [=] {
            auto t = list(b.one);
            return bare->reduce(t, c10d::ReduceOptions());
          }),
      c10d_op(
          "all_gather", [=] { group.all_gather(b.many, b.one); },
          [=] {
            auto out = b.many, in = b.one;
            return bare->_allgather_base(out, in, c10d::AllgatherOptions());
          }),
      c10d_op(
          "all_to_all", [=] { group.all_to_all(b.other, b.many); },
          [=] {
            auto out = b.other, in = b.many;
            std::vector<std::int64_t> none;
            return bare->alltoall_base(out, in, none, none, c10d::AllToAllOptions());
          }),
      c10d_op(
          "gather", [=] { group.gather(b.many, b.one, 0); },
          [=] {
            std::vector<Tensors> out;
            if (me == 0) out.push_back(parts);
            auto in = list(b.one);
            return bare->gather(out, in, c10d::GatherOptions());
          }),
      c10d_op(
          "scatter", [=] { group.scatter(b.one, b.many, 0); },
          [=] {
            std::vector<Tensors> in;
            if (me == 0) in.push_back(parts);
            auto out = list(b.one);
            return bare->scatter(out, in, c10d::ScatterOptions());
          }),
      {"send_receive", "c10d Gloo",
       [=] {
         if (me == 0) {
           group.send(b.one, peer);
           group.receive(b.one, peer);
         } else {
           group.receive(b.one, peer);
           group.send(b.one, peer);
         }
       },
       [=] {
         auto t = list(b.one);
         if (me == 0) {
           bare->send(t, peer, 0)->wait();
           bare->recv(t, peer, 0)->wait();
         } else {
           bare->recv(t, peer, 0)->wait();
           bare->send(t, peer, 0)->wait();
         }
       }},
  };
}

/// Seconds of one call: both ranks together, `repeats` calls in a row, the slower rank counts.
double sample(const Group& control, const std::function<void()>& call, int repeats) {
  control.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) call();
  const double mine = std::chrono::duration<double>(Clock::now() - start).count() / repeats;
  const at::Tensor slowest = at::full({1}, mine, at::kDouble);
  control.all_reduce(slowest, tessera::ReduceOp::max);
  return slowest.item<double>();
}

void measure(Report& report, const Group& control, const std::string& backend, const std::string& size, double bytes, const Case& c, bool large) {
  const double once = std::max(sample(control, c.bare, 3), sample(control, c.bare, 3));
  const int repeats = std::clamp(static_cast<int>(2e-3 / once), 1, 500);
  const auto pairs =
      tessera::bench::alternate(kPairs, [&] { return sample(control, c.ours, repeats); }, [&] { return sample(control, c.bare, repeats); });
  std::vector<double> reference;
  for (const auto& pair : pairs) reference.push_back(pair.second);
  const double limit = 1 + std::max(kAddedShare, kAddedSeconds / tessera::bench::median(reference));
  const std::string name = tessera::concat(c.operation, " ", size, " ", backend);
  if (large)
    report.bandwidth(name, pairs, bytes, c.reference, limit);
  else
    report.time(name, pairs, c.reference, limit);
}

int run(const std::string& backend, const std::string& out) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = backend;
  options.check_level = tessera::CheckLevel::off;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2) throw tessera::InvalidArgument(tessera::concat("bench_comm runs on 2 ranks, and there are ", manager.world_size()));
  if (std::thread::hardware_concurrency() < 2)
    throw tessera::InvalidArgument("bench_comm needs 2 cores: times of ranks that share a core mean nothing");
  const Group world = manager.world();
  const Group gloo = backend == "gloo" ? world : manager.group(world.ranks(), {.backend = "gloo"});
  // The bare backend meets through a file whose name both ranks learn from the group.
  std::string path = world.rank() == 0 ? tessera::concat("/tmp/tessera_bench_comm_", Clock::now().time_since_epoch().count()) : "";
  path = world.broadcast_bytes(path, 0);
  auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
  const auto bare_gloo = tessera::make_gloo_backend(store, world.rank(), 2, std::chrono::seconds(60));

  Report report("comm", world.rank() == 0 ? out : "");
  report.meta("torch", TORCH_VERSION);
  report.meta("ranks", 2);
  report.meta("threads_per_rank", at::get_num_threads());
  report.meta("pairs", kPairs);
#ifdef TESSERA_BENCH_MPI
  if (backend == "mpi") report.meta("mpi", tessera::MpiWorld::initialize().library());
#endif
  const struct {
    const char* label;
    std::int64_t floats;
    bool large;
  } sizes[] = {{"4 B", 1, false}, {"4 KiB", 1 << 10, false}, {"256 KiB", 1 << 16, true}, {"4 MiB", 1 << 20, true}};
  for (const auto& size : sizes) {
    const Buffers b = buffers(world, size.floats);
    const double bytes = 4.0 * static_cast<double>(size.floats);
#ifdef TESSERA_BENCH_MPI
    if (backend == "mpi")
      for (const auto& c : mpi_cases(world, b, size.floats)) measure(report, world, "mpi", size.label, bytes, c, size.large);
#endif
    for (const auto& c : gloo_cases(gloo, bare_gloo, b, size.floats)) measure(report, world, "gloo", size.label, bytes, c, size.large);
  }
#ifdef TESSERA_BENCH_MPI
  if (backend == "mpi")
    measure(report, world, "mpi", "", 0, {"barrier", "MPI_Barrier", [=] { world.barrier(); }, [] { MPI_Barrier(MPI_COMM_WORLD); }}, false);
#endif
  measure(report, world, "gloo", "", 0,
          {"barrier", "c10d Gloo", [=] { gloo.barrier(); }, [=] { bare_gloo->barrier(c10d::BarrierOptions())->wait(); }}, false);
  world.barrier();
  int status = 0;
  if (world.rank() == 0) {
    std::remove(path.c_str());
    status = report.finish();
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Collectives through Group beside the bare libraries, on two ranks");
  std::string backend = tessera::has_mpi() ? "mpi" : "gloo", out;
  app.add_option("--backend", backend, "mpi: MPI and Gloo, under MPI's launcher; gloo: Gloo alone")->check(CLI::IsMember({"mpi", "gloo"}));
  app.add_option("--out", out, "JSON file");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(backend, out);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_comm: %s\n", e.what());
    return 2;
  }
}
