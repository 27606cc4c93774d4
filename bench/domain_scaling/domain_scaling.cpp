// A U-Net's training step on one field of fixed size: two ranks of one thread each, half of the
// rows each, beside one such rank alone with all of it. Time, and the most bytes that libtorch's
// allocator had out at once.

#include <c10/core/Allocator.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "backend.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using tessera::bench::Report;
using Clock = std::chrono::steady_clock;
namespace nn = torch::nn;

nn::Conv2d conv(int in, int out) { return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)); }

// Two levels down and up, two convolutions each.
struct UNetImpl : nn::Module {
  explicit UNetImpl(int width) {
    int in = 3;
    for (int level = 0; level < 3; ++level) {
      const int out = width << level;
      down.push_back(
          register_module(tessera::concat("down", level),
                          nn::Sequential(conv(in, out), nn::ReLU(), conv(out, out), nn::ReLU())));
      in = out;
    }
    for (int level = 1; level >= 0; --level) {
      const int out = width << level;
      up.push_back(register_module(
          tessera::concat("up", level),
          nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2 * out, out, 2).stride(2))));
      join.push_back(register_module(
          tessera::concat("join", level),
          nn::Sequential(conv(2 * out, out), nn::ReLU(), conv(out, out), nn::ReLU())));
    }
    last = register_module("last", nn::Conv2d(nn::Conv2dOptions(width, 1, 1)));
  }
  at::Tensor forward(at::Tensor x) {
    std::vector<at::Tensor> kept;
    for (std::size_t i = 0; i < down.size(); ++i) {
      x = down[i]->forward(i ? torch::max_pool2d(x, 2) : x);
      kept.push_back(x);
    }
    for (std::size_t i = 0; i < up.size(); ++i)
      x = join[i]->forward(torch::cat({up[i](x), kept[1 - i]}, 1));
    return last(x);
  }
  std::vector<nn::Sequential> down, join;
  std::vector<nn::ConvTranspose2d> up;
  nn::Conv2d last{nullptr};
};
TORCH_MODULE(UNet);

// Bytes that the allocator has out, and the most there were.
struct Memory : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    now += size;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t now = 0, peak = 0;
};

struct Trainer {
  Trainer(UNet net, at::Tensor input, at::Tensor target)
      : network(std::move(net)),
        x(std::move(input)),
        y(std::move(target)),
        optimizer(network->parameters(), torch::optim::AdamOptions(1e-3)) {}
  double step() {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(network(x), y);
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  }
  UNet network;
  at::Tensor x, y;
  torch::optim::Adam optimizer;
};

double seconds(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::int64_t peak_of(const std::function<void()>& call) {
  const auto memory = std::make_shared<Memory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  call();
  return memory->peak;
}

int run(const std::string& asked, const tessera::bench::Output& output, std::int64_t size,
        int width, int pairs) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = asked;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument(
        tessera::concat("bench_domain_scaling runs on 2 ranks, not ", manager.world_size()));
  if (std::thread::hardware_concurrency() < 2)
    throw tessera::InvalidArgument("bench_domain_scaling needs 2 cores");
  const std::string backend = tessera::bench::backend_of(asked, manager);
  const auto mesh = manager.mesh({{"domain", 2}});
  const auto world = manager.world();
  const auto made = [&] {
    torch::manual_seed(1);
    return UNet(width);
  };
  torch::manual_seed(2);
  const at::Tensor input = torch::randn({1, 3, size, size}),
                   target = torch::randn({1, 1, size, size});
  // Everything that a rank needs lives inside the count: data, weights, optimizer's state,
  // activations.
  std::unique_ptr<Trainer> alone, together;
  double loss_alone = 0, loss_together = 0;
  const auto peak_alone = peak_of([&] {
    alone = std::make_unique<Trainer>(made(), input.clone(), target.clone());
    for (int i = 0; i < 2; ++i) loss_alone = alone->step();
  });
  world.barrier();
  const auto peak_together = peak_of([&] {
    UNet network = made();
    tessera::distribute_module(*network, mesh);
    const auto own = [&](const at::Tensor& t) {
      return tessera::from_local(t.narrow(2, manager.rank() * size / 2, size / 2).clone(),
                                 tessera::ShardSpec(mesh, t.sizes().vec(), {tessera::Shard(2)}));
    };
    together = std::make_unique<Trainer>(network, own(input), own(target));
    for (int i = 0; i < 2; ++i) loss_together = together->step();
  });
  if (std::abs(loss_alone - loss_together) > 1e-4 * std::abs(loss_alone))
    throw tessera::Error(tessera::concat("the losses differ: ", loss_alone, " on one rank, ",
                                         loss_together, " on two"));

  Report report("domain_scaling", output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("field", tessera::concat(size, " x ", size));
  report.meta("width", width);
  // Rank 1 waits while rank 0 steps alone; the slower rank counts where both step.
  const auto agreed = [&](double mine) {
    const at::Tensor slowest = at::full({1}, mine, at::kDouble);
    world.all_reduce(slowest, tessera::ReduceOp::max);
    return slowest.item<double>();
  };
  const std::string step = tessera::concat("training step, 2 ranks ", backend),
                    bytes = "peak bytes a rank, 2 ranks";
  if (report.wants(step)) {
    const auto measured = tessera::bench::alternate(
        pairs,
        [&] {
          world.barrier();
          return agreed(seconds([&] { together->step(); }));
        },
        [&] { return agreed(manager.rank() == 0 ? seconds([&] { alone->step(); }) : 0); });
    report.time(step, measured, "1 rank", 1 / (backend == "shm" ? 1.85 : 1.8));
  }
  const double most = agreed(static_cast<double>(peak_together));
  tessera::bench::Record memory;
  memory.name = bytes;
  memory.metric = "bytes";
  memory.value = most;
  memory.unit = "B";
  memory.reference = "1 rank";
  memory.reference_value = static_cast<double>(peak_alone);
  memory.ratio = most / static_cast<double>(peak_alone);
  memory.limit = 0.58;
  memory.holds = *memory.ratio <= *memory.limit;
  if (report.wants(bytes)) report.add(memory);
  world.barrier();
  return manager.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A training step of a U-Net on two ranks beside one, the same field");
  std::string backend = "gloo";
  tessera::bench::Output output{.shared = true};
  std::int64_t size = 512;
  int width = 12, pairs = 31;
  tessera::bench::add_backend(app, backend);
  tessera::bench::add_output(app, output);
  app.add_option("--size", size, "rows and columns of the field; a multiple of 8")
      ->check(CLI::PositiveNumber);
  app.add_option("--width", width, "channels of the first level")->check(CLI::PositiveNumber);
  app.add_option("--pairs", pairs, "samples")->check(CLI::Range(31, 1001));
  CLI11_PARSE(app, argc, argv);
  try {
    return run(backend, output, size, width, pairs);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_domain_scaling: %s\n", e.what());
    return 2;
  }
}
