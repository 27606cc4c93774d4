// Neighbourhood attention of a field cut in rows over two ranks, one thread each, forward +
// backward: the interior computed while keys and values travel, and the default order, beside keys
// and values put together with their halo first. How the default was chosen (ops/neighborhood.cpp).

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/attention/neighborhood.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using Order = tessera::HaloPolicy::Order;

constexpr double kNone = 1000;

/// Beside `assemble`.
struct Way {
  const char* name;
  Order order;
  double limit;
};
constexpr Way kWays[] = {{"interior first", Order::interior_first, kNone},
                         {"default", Order::automatic, 1.05}};

struct Options {
  std::string backend = "gloo";
  tessera::bench::Output output{.shared = true};
  int pairs = 31, largest = 128;
};

int run(const Options& o) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = o.backend;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument(tessera::concat(
        "bench_neighborhood runs on 2 ranks, and there are ", manager.world_size()));
  if (std::thread::hardware_concurrency() < 2)
    throw tessera::InvalidArgument(
        "bench_neighborhood needs 2 cores: times of ranks that share a core mean nothing");
  const std::string backend = tessera::bench::backend_of(o.backend, manager);
  // Gloo's calls wait for other threads, on cores that must not fall asleep meanwhile.
  std::optional<tessera::bench::AwakeCores> awake;
  if (backend == "gloo") awake.emplace();
  const auto mesh = manager.mesh({{"domain", 2}});
  const auto world = manager.world();
  tessera::bench::Report report("neighborhood", o.output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("threads_per_rank", at::get_num_threads());
  report.meta("pairs", o.pairs);
  for (const int h : {8, 16, 32, 64, 128}) {
    const auto name_of = [&](const Way& way) {
      return tessera::concat(way.name, " H=", h, " ", backend);
    };
    const auto wanted = [&](const Way& way) { return report.wants(name_of(way)); };
    if (h > o.largest || std::none_of(std::begin(kWays), std::end(kWays), wanted)) continue;
    const tessera::ShardSpec cut(mesh, {1, h, h, 4, 8}, {tessera::Shard(1)});
    const auto field = [&] {
      return tessera::from_local(at::randn(cut.local_shape()), cut).detach().requires_grad_(true);
    };
    const at::Tensor q = field(), k = field(), v = field(), g = field().detach();
    const auto sample = [&](Order order, int repeats) {
      tessera::set_halo_policy(manager, {.order = order});
      return tessera::bench::seconds_of(world, repeats, [&] {
        torch::autograd::grad({tessera::neighborhood_attention_2d(q, k, v, {7, 7})}, {q, k, v},
                              {g});
      });
    };
    for (int i = 0; i < 2; ++i) {
      for (const Order order : {Order::assemble, Order::interior_first, Order::automatic})
        sample(order, 1);
    }
    const int repeats = std::clamp(static_cast<int>(3e-3 / sample(Order::assemble, 2)), 1, 50);
    for (const Way& way : kWays) {
      if (!wanted(way)) continue;
      const auto pairs = tessera::bench::alternate(
          o.pairs, [&] { return sample(way.order, repeats); },
          [&] { return sample(Order::assemble, repeats); });
      report.time(name_of(way), pairs, "assemble", way.limit);
    }
  }
  world.barrier();
  return manager.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Neighbourhood attention on a cut field: orders of work, on two ranks");
  Options o;
  tessera::bench::add_backend(app, o.backend);
  tessera::bench::add_output(app, o.output);
  app.add_option("--pairs", o.pairs, "samples a case")->check(CLI::Range(31, 1001));
  app.add_option("--largest", o.largest, "largest H");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_neighborhood: %s\n", e.what());
    return 2;
  }
}
