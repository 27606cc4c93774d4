// Latency and bandwidth of each collective through Group, beside the bare library, on two ranks:
// MPI beside MPI's own calls, or Gloo beside c10d's Gloo backend called directly, or, with --device
// cuda, NCCL beside the same backend called directly. Blocking calls;
// checks and trace off. Ours may add 5 us or 3 %, whichever is larger. Groups over shm beside both
// libraries: at most 1.1 of MPI's time, and a third of Gloo's.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "calls.h"
#include "device.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/job/manager.h"

namespace {

using tessera::Group;
using tessera::bench::Buffers;
using tessera::bench::Calls;
using tessera::bench::Report;
using Clock = std::chrono::steady_clock;

constexpr double kAddedSeconds = 5e-6;
constexpr double kAddedShare = 0.03;
constexpr double kShmOfMpi = 1.1, kShmOfGloo = 1.0 / 3;
// Threads of Gloo share the cores, and its calls take two or ten times as long for some
// milliseconds when one waits for another's time slice. Many short samples in turn see the same
// share of those on both sides.
constexpr double kSampleSeconds = 1e-3;
constexpr double kCaseSeconds = 2;
/// At least.
constexpr int kPairs = 101;

struct Operation {
  const char* name;
  /// What the reference is called there.
  const char* mpi;
  void (*call)(Calls& calls, int rank);
};

void there_and_back(Calls& calls, int rank) {
  if (rank == 0) {
    calls.send(1);
    calls.receive(1);
  } else {
    calls.receive(0);
    calls.send(0);
  }
}

constexpr Operation kBarrier = {"barrier", "MPI_Barrier", [](Calls& c, int) { c.barrier(); }};
constexpr Operation kOperations[] = {
    {"all_reduce", "MPI_Allreduce", [](Calls& c, int) { c.all_reduce(); }},
    {"broadcast", "MPI_Bcast", [](Calls& c, int) { c.broadcast(); }},
    {"reduce", "MPI_Reduce", [](Calls& c, int) { c.reduce(); }},
    {"all_gather", "MPI_Allgather", [](Calls& c, int) { c.all_gather(); }},
    {"reduce_scatter", "MPI_Reduce_scatter_block", [](Calls& c, int) { c.reduce_scatter(); }},
    {"all_to_all", "MPI_Alltoall", [](Calls& c, int) { c.all_to_all(); }},
    {"gather", "MPI_Gather", [](Calls& c, int) { c.gather(); }},
    {"scatter", "MPI_Scatter", [](Calls& c, int) { c.scatter(); }},
    {"send_receive", "MPI_Send, MPI_Recv", there_and_back},
};

struct Size {
  const char* label;
  std::int64_t floats;
  /// Shown as bandwidth.
  bool large;
};
constexpr Size kSizes[] = {{"4 B", 1, false},
                           {"4 KiB", 1 << 10, false},
                           {"256 KiB", 1 << 16, true},
                           {"4 MiB", 1 << 20, true}};

/// Ours and the bare library's calls of one backend, and how samples are taken.
struct Bench {
  Report& report;
  Group group;
  /// "mpi", "gloo" or "nccl"
  std::string backend;
  std::function<std::unique_ptr<Calls>(const Buffers&)> bare;
  /// Ours is shm: its limit, else 0.
  double shm = 0;
  c10::Device device = c10::kCPU;

  /// Seconds of one call: both ranks together, `repeats` calls in a row, the slower rank counts.
  double sample(Calls& calls, const Operation& operation, int repeats) const {
    tessera::bench::settle(device);
    group.barrier();
    const int rank = group.rank();
    const auto start = Clock::now();
    for (int i = 0; i < repeats; ++i) operation.call(calls, rank);
    tessera::bench::settle(device);
    const double mine = std::chrono::duration<double>(Clock::now() - start).count() / repeats;
    const at::Tensor slowest = at::full({1}, mine, at::kDouble);
    group.all_reduce(slowest, tessera::ReduceOp::max);
    return slowest.item<double>();
  }

  void measure(const Operation& operation, const Size& size) const {
    const std::string name =
        tessera::concat(operation.name, " ", size.label, *size.label ? " " : "",
                        shm > 0 ? "shm beside " : "", backend);
    if (!report.wants(name)) return;
    const Buffers b = tessera::bench::make_buffers(group.size(), size.floats, device);
    const auto our_calls = tessera::bench::group_calls(group, b), bare_calls = bare(b);
    const double once =
        std::max(sample(*bare_calls, operation, 3), sample(*bare_calls, operation, 3));
    const int repeats = std::clamp(static_cast<int>(kSampleSeconds / once), 1, 2000);
    const int count =
        std::clamp(static_cast<int>(kCaseSeconds / (2 * once * repeats)), kPairs, 1001);
    const auto pairs = tessera::bench::alternate(
        count, [&] { return sample(*our_calls, operation, repeats); },
        [&] { return sample(*bare_calls, operation, repeats); });
    std::vector<double> reference;
    for (const auto& pair : pairs) reference.push_back(pair.second);
    const double limit =
        shm > 0 ? shm
                : 1 + std::max(kAddedShare, kAddedSeconds / tessera::bench::median(reference));
    const char* what = backend == "mpi"    ? operation.mpi
                       : backend == "nccl" ? "c10d NCCL"
                                           : "c10d Gloo";
    if (size.large)
      report.bandwidth(name, pairs, 4.0 * static_cast<double>(size.floats), what, limit);
    else
      report.time(name, pairs, what, limit);
  }

  void measure_all() const {
    for (const auto& size : kSizes)
      for (const auto& operation : kOperations) measure(operation, size);
    measure(kBarrier, {"", 1, false});
  }
};

int run(const std::string& backend, const std::string& device_name,
        const tessera::bench::Output& output) {
  at::set_num_threads(1);
  const c10::Device device = tessera::bench::device_of(device_name, 2);
  tessera::ManagerOptions options;
  options.backend = device.is_cuda() ? "gloo" : backend;
  options.device = device;
  options.check_level = tessera::CheckLevel::off;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument(
        tessera::concat("bench_comm runs on 2 ranks, and there are ", manager.world_size()));
  if (std::thread::hardware_concurrency() < 2)
    throw tessera::InvalidArgument(
        "bench_comm needs 2 cores: times of ranks that share a core mean nothing");
  const Group world = manager.world();
  Report report("comm", output, world.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("ranks", 2);
  report.meta("threads_per_rank", at::get_num_threads());
  report.meta("pairs_at_least", kPairs);
  report.meta("device", device.str());
  if (device.is_cuda()) {
    report.meta("nccl", tessera::nccl_version());
    const auto nccl = world.process_group()->getBackend(c10::DeviceType::CUDA);
    const auto bare = [&](const Buffers& b) { return tessera::bench::c10d_calls(nccl, b); };
    Bench{report, world, "nccl", bare, 0, device}.measure_all();
    world.barrier();
  } else if (backend == "mpi") {
    report.meta("mpi", tessera::mpi_library());
    const auto bare = [&](const Buffers& b) { return tessera::bench::mpi_calls(world.rank(), b); };
    Bench{report, world, backend, bare}.measure_all();
    Bench{report, manager.group(world.ranks(), {.backend = "shm"}), backend, bare, kShmOfMpi}
        .measure_all();
  } else {
    // Gloo's calls sleep until another thread wakes them; MPI's spin
    const tessera::bench::AwakeCores awake;
    // The bare backend meets through a file whose name both ranks learn from the group.
    std::string path =
        world.rank() == 0
            ? (std::filesystem::temp_directory_path() /
               tessera::concat("tessera_bench_comm_", Clock::now().time_since_epoch().count()))
                  .string()
            : "";
    path = world.broadcast_bytes(path, 0);
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::FileStore>(path, 2), world.rank(), 2, std::move(options));
    const auto bare = [&](const Buffers& b) { return tessera::bench::c10d_calls(gloo, b); };
    Bench{report, world, backend, bare}.measure_all();
    Bench{report, manager.group(world.ranks(), {.backend = "shm"}), backend, bare, kShmOfGloo}
        .measure_all();
    world.barrier();
    if (world.rank() == 0) std::remove(path.c_str());
  }
  return world.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Collectives through Group beside the bare libraries, on two ranks");
  std::string backend = tessera::has_mpi() ? "mpi" : "gloo", device = "cpu";
  tessera::bench::Output output{.shared = true};
  app.add_option("--backend", backend, "mpi, under MPI's launcher; gloo, under any")
      ->check(CLI::IsMember({"mpi", "gloo"}));
  tessera::bench::add_device(app, device);
  tessera::bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::guarded("bench_comm", [&] { return run(backend, device, output); });
}
