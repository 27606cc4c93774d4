// A 3 x 3 convolution of (1, 8, H/2, H) on each of two ranks, the rows of one field of H x H,
// beside plain convolution of the same local part: forward, and forward + backward. One thread a
// rank. With --device cuda the ranks have GPUs, or share one, and speak over NCCL; no limits are
// set there. All orders of work can be shown beside each other (--orders): that is how the default
// was chosen.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "device.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using tessera::HaloPolicy;
using tessera::bench::Report;
using Clock = std::chrono::steady_clock;

// Upper limits of ours / plain.
struct Limits {
  /// Over MPI and through memory; over Gloo.
  double low, gloo;
};
constexpr double kNone = 1000;
constexpr double kSampleSeconds = 3e-3, kCaseSeconds = 2;
constexpr int kMostPairs = 201;
const std::map<int, Limits> kLimits = {
    {16, {2.5, kNone}},    {32, {kNone, kNone}}, {64, {kNone, kNone}}, {128, {1.15, 1.8}},
    {256, {kNone, kNone}}, {512, {1.04, 1.08}},  {1024, {1.04, 1.08}}};

/// Seconds of one call, `repeats` in a row; the slower rank counts.
double sample(const tessera::Group& control, c10::Device device, const std::function<void()>& call,
              int repeats) {
  tessera::bench::settle(device);
  control.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) call();
  tessera::bench::settle(device);
  const at::Tensor slowest = at::full(
      {1}, std::chrono::duration<double>(Clock::now() - start).count() / repeats, at::kDouble);
  control.all_reduce(slowest, tessera::ReduceOp::max);
  return slowest.item<double>();
}

struct Options {
  std::string backend = "gloo", device = "cpu";
  tessera::bench::Output output{.shared = true};
  bool orders = false;
  int pairs = 31;
};

int run(const Options& o) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = o.backend;
  const c10::Device device = tessera::bench::device_of(o.device, 2);
  options.device = device;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument(
        tessera::concat("bench_halo runs on 2 ranks, and there are ", manager.world_size()));
  const std::string backend =
      device.is_cuda() ? "nccl" : tessera::bench::backend_of(o.backend, manager);
  if (std::thread::hardware_concurrency() < 2)
    throw tessera::InvalidArgument(
        "bench_halo needs 2 cores: times of ranks that share a core mean nothing");
  // Gloo's calls wait for other threads, on cores that must not fall asleep meanwhile.
  std::optional<tessera::bench::AwakeCores> awake;
  if (backend == "gloo") awake.emplace();
  const auto mesh = manager.mesh({{"domain", 2}});
  const auto world = manager.world();
  Report report("halo", o.output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("threads_per_rank", at::get_num_threads());
  report.meta("pairs", o.pairs);
  report.meta("device", device.str());
  using Order = HaloPolicy::Order;
  std::vector<std::pair<std::string, Order>> orders{{"", Order::automatic}};
  if (o.orders)
    orders = {{" interior first", Order::interior_first}, {" assemble", Order::assemble}};
  bool sent_the_least = true;
  const at::TensorOptions here(device);
  for (const auto& [h, limits] : kLimits) {
    const at::Tensor local = at::randn({1, 8, h / 2, h}, here);
    const tessera::ShardSpec cut(mesh, {1, 8, h, h}, {tessera::Shard(2)});
    const at::Tensor weight = at::randn({8, 8, 3, 3}, here), bias = at::randn({8}, here);
    const auto replicated = [&](const at::Tensor& t) {
      return tessera::distribute_tensor(t, mesh, {tessera::Replicate()});
    };
    const at::Tensor x = tessera::from_local(local, cut), w = replicated(weight),
                     b = replicated(bias);
    const at::Tensor plain_x = local.clone().requires_grad_(true),
                     plain_w = weight.clone().requires_grad_(true),
                     plain_b = bias.clone().requires_grad_(true);
    const at::Tensor our_x = tessera::from_local(local.clone(), cut).detach().requires_grad_(true),
                     our_w = w.detach().clone().requires_grad_(true),
                     our_b = b.detach().clone().requires_grad_(true);
    const at::Tensor g = at::randn({1, 8, h / 2, h}, here), our_g = tessera::from_local(g, cut);
    const double limit = device.is_cuda() ? kNone : backend == "gloo" ? limits.gloo : limits.low;
    for (const auto& [label, order] : orders) {
      tessera::set_halo_policy(manager, {order, HaloPolicy::Backward::exchange});
      const auto measure = [&](const std::string& what, const std::function<void()>& ours,
                               const std::function<void()>& plain, double at_most) {
        const std::string name = tessera::concat(what, label, " H=", h, " ", backend);
        if (!report.wants(name)) return;
        for (int i = 0; i < 3; ++i) {
          sample(world, device, ours, 2);
          sample(world, device, plain, 2);
        }
        const double once = sample(world, device, plain, 3);
        const int repeats = std::clamp(static_cast<int>(kSampleSeconds / once), 1, 200);
        const int count = std::clamp(static_cast<int>(kCaseSeconds / (2 * once * repeats)), o.pairs,
                                     std::max(o.pairs, kMostPairs));
        const auto pairs = tessera::bench::alternate(
            count, [&] { return sample(world, device, ours, repeats); },
            [&] { return sample(world, device, plain, repeats); });
        report.time(name, pairs, "plain", at_most);
      };
      {
        const at::NoGradGuard no_grad;
        measure(
            "forward", [&] { const auto y = at::conv2d(x, w, b, 1, 1); },
            [&] { const auto y = at::conv2d(local, weight, bias, 1, 1); }, limit);
        tessera::CommTraceScope trace(manager);
        const auto y = at::conv2d(x, w, b, 1, 1);
        std::int64_t bytes = 0;
        for (const auto& call : trace->summary()) bytes += call.bytes;
        sent_the_least &= bytes == 2 * 4 * 8 * h;  // a row of 8 channels out, and one in
      }
      // Gradients of the input and of this rank's terms of weight and bias; their reduction belongs
      // to the layer above.
      const auto both = [](const at::Tensor& in, const at::Tensor& k, const at::Tensor& c,
                           const at::Tensor& gradient) {
        return torch::autograd::grad({at::conv2d(in, k, c, 1, 1)}, {in, k, c}, {gradient});
      };
      measure(
          "forward+backward", [&] { both(our_x, our_w, our_b, our_g); },
          [&] { both(plain_x, plain_w, plain_b, g); }, limit);
    }
  }
  world.barrier();
  int status = 0;
  if (manager.rank() == 0) {
    status = report.finish();
    std::printf("bytes sent %s the plan's lower bound\n",
                sent_the_least ? "equal" : "DO NOT equal");
  }
  return status != 0 || sent_the_least ? status : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Sharded convolution beside plain convolution of the local part, on two ranks");
  Options o;
  tessera::bench::add_backend(app, o.backend);
  tessera::bench::add_device(app, o.device);
  tessera::bench::add_output(app, o.output);
  app.add_option("--pairs", o.pairs, "samples a case at least; short cases take more")
      ->check(CLI::Range(31, 1001));
  app.add_flag("--orders", o.orders, "each order of work instead of the default");
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::guarded("bench_halo", [&] { return run(o); });
}
