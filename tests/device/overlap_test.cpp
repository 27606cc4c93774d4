// What may run at the same time on the stand-in device, and what cannot: by the streams and events
// of a step, whatever order is drawn.

#include <array>

#include "../nn/fully_shard_case.h"
#include "../pipeline/pipeline_support.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/ops/attention/neighborhood.h"
#include "timeline.h"
#include "transport.h"

namespace tessera::test {
namespace {

using stand_in::Timeline;
using Tasks = Timeline::Tasks;

// The tasks of this rank's device in a step, after two others; the last is a kernel after it.
Tasks tasks_of(const Timeline& timeline, const DistributedManager& manager,
               const std::function<void()>& step) {
  const int here = manager.device().index();
  for (int i = 0; i < 2; ++i) step();
  const auto before = static_cast<std::ptrdiff_t>(timeline.tasks(here).size());
  step();
  at::ones({1}, at::TensorOptions(manager.device()));
  const Tasks all = timeline.tasks(here);
  return {all.begin() + before, all.end()};
}

std::string text(const Tasks& all) {
  std::string lines;
  for (const auto& t : all) lines += concat("  ", t.stream, " ", t.what, "\n");
  return lines;
}

// Calls of one name: how many, and of how many a later kernel may run at the same time whose name
// has `kernel`. The kernel at the end comes after all of them.
struct Calls {
  Calls(const Tasks& all, const std::string& call, const std::string& kernel) {
    for (auto one = all.begin(); one != all.end(); ++one) {
      if (one->what != call) continue;
      ++number;
      overlapped += std::any_of(one, all.end(), [&](const Timeline::Task& t) {
        return t.is_kernel() && t.is(kernel) && t.may_overlap(*one);
      });
      EXPECT_TRUE(one->precedes(all.back())) << call << " is not waited for\n" << text(all);
    }
  }
  int number = 0, overlapped = 0;
};

// A timeline of two ranks, whose devices go through `body`.
void on_two(const std::function<void(DistributedManager&, const Timeline&)>& body) {
  const Timeline timeline;
  stand_in::on_devices(2, [&](DistributedManager& manager) {
    at::set_num_threads(1);
    test::seed(3);
    body(manager, timeline);
  });
  EXPECT_EQ(stand_in::take_faults(), "");
}

TEST(DeviceOverlap, GradientsAreReducedDuringBackward) {
  on_two([](DistributedManager& manager, const Timeline& timeline) {
    const int here = manager.device().index();
    const at::Tensor x = randn({4, 8}).to(manager.device());
    for (const bool overlap : {true, false}) {
      torch::nn::Sequential net;
      for (int i = 0; i < 5; ++i) net->push_back(torch::nn::Linear(8, 8));
      net->to(manager.device());
      DistributedDataParallelOptions options;
      options.reducer.overlap = overlap;
      // A bucket for each layer.
      options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 256;
      DistributedDataParallel ddp(net, manager.world(), options);
      torch::optim::SGD sgd(net->parameters(), 1e-2);
      std::size_t optimizer = 0;
      const Tasks all = tasks_of(timeline, manager, [&] {
        sgd.zero_grad();
        ddp(x).square().mean().backward();
        const std::size_t before = timeline.tasks(here).size();
        sgd.step();
        optimizer = timeline.tasks(here).size() - before;
      });
      const Calls reductions(all, "all_reduce", "mm");
      EXPECT_EQ(reductions.number, 5) << text(all);
      // After the gradient of the first layer there is nothing to compute.
      EXPECT_EQ(reductions.overlapped, overlap ? 4 : 0) << text(all);
      // The optimizer begins when all of them are over.
      EXPECT_GE(optimizer, 10U);
      const auto first = all.end() - 1 - static_cast<std::ptrdiff_t>(optimizer);
      for (const auto& reduction : all) {
        if (reduction.what != "all_reduce") continue;
        EXPECT_TRUE(std::all_of(first, all.end(), [&](const auto& t) {
          return !t.is_kernel() || reduction.precedes(t);
        })) << text(all);
      }
    }
  });
}

TEST(DeviceOverlap, InteriorsAreComputedWhileHalosTravel) {
  using Order = HaloPolicy::Order;
  on_two([](DistributedManager& manager, const Timeline& timeline) {
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    const auto field = [&](std::vector<std::int64_t> shape, int dim) {
      return distribute_tensor(randn(shape, at::kDouble).to(manager.device()), mesh, {Shard(dim)})
          .detach()
          .requires_grad_();
    };
    const at::Tensor image = field({1, 2, 24, 6}, 2), q = field({1, 16, 6, 2, 4}, 1);
    const at::Tensor weight =
        randn({2, 2, 3, 3}, at::kDouble).to(manager.device()).requires_grad_();
    const std::pair<const char*, std::function<at::Tensor()>> all[] = {
        {"convolution", [&] { return at::conv2d(image, weight, {}, 1, 1); }},
        {"_neighborhood_", [&] { return neighborhood_attention_2d(q, q, q, {3, 3}); }}};
    for (const auto& [kernel, make] : all)
      for (const Order order : {Order::interior_first, Order::wait_first, Order::assemble}) {
        set_halo_policy(manager, {.order = order});
        const Tasks tasks = tasks_of(timeline, manager, [&] { make().square().sum().backward(); });
        const Calls exchanges(tasks, "exchange", kernel);
        EXPECT_GE(exchanges.number, 2) << text(tasks);
        EXPECT_EQ(exchanges.overlapped, order == Order::interior_first ? exchanges.number : 0)
            << kernel << "\n"
            << text(tasks);
        // The step's kernels that read a halo come after it.
        for (const auto& exchange : tasks) {
          if (exchange.what != "exchange") continue;
          EXPECT_TRUE(
              std::any_of(tasks.begin(), tasks.end() - 1,
                          [&](const auto& t) { return t.is_kernel() && exchange.precedes(t); }))
              << kernel << "\n"
              << text(tasks);
        }
      }
  });
}

TEST(DeviceOverlap, UnitsAreGatheredWhileOthersCompute) {
  on_two([](DistributedManager& manager, const Timeline& timeline) {
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    const at::Tensor x =
        distribute_tensor(randn({6, 5}, at::kDouble).to(manager.device()), mesh, {Shard(0)});
    for (const int prefetch : {0, 1}) {
      Net net = net_of({});
      net->to(manager.device());
      fully_shard(*net, mesh, {.prefetch = prefetch, .coalesce_bytes = 0});
      const Tasks all =
          tasks_of(timeline, manager, [&] { net->forward(x).square().mean().backward(); });
      const Calls gathers(all, "all_gather", "mm");
      EXPECT_GE(gathers.number, 4) << text(all);
      const Calls reductions(all, "reduce_scatter", "mm");
      EXPECT_GE(reductions.number, 3) << text(all);
      if (prefetch == 0) {
        EXPECT_EQ(gathers.overlapped, 0) << text(all);
        // The next gather comes behind the reduction on the group's stream, and is waited for.
        EXPECT_LE(reductions.overlapped, 1) << text(all);
      } else {
        EXPECT_GE(gathers.overlapped, gathers.number - 3) << text(all);
        EXPECT_GE(reductions.overlapped, reductions.number - 2) << text(all);
      }
    }
  });
}

void pipeline_overlaps(const PipelineSchedule& schedule, std::array<int, 2> least) {
  Case c;
  c.ranks = 2;
  c.schedule = schedule;
  c.plain = {1, 1};
  c.marks = c.recompute = {false, false};
  c.rows = {3, 3, 3, 3};
  on_two([&](DistributedManager& manager, const Timeline& timeline) {
    OwnStages own(c, manager.rank());
    for (const auto& [s, stage] : own.by_number) stage->to(manager.device());
    PipelineBatch batch = c.batch();
    for (auto* lists : {&batch.inputs, &batch.targets})
      for (auto& list : *lists)
        for (at::Tensor& t : list) t = t.to(manager.device());
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", c.schedule, own.stages, mean_of);
    const Tasks all = tasks_of(timeline, manager, [&] { pipeline.step(batch); });
    const Calls messages(all, "exchange", "mm");
    EXPECT_GE(messages.number, 4) << text(all);
    EXPECT_GE(messages.overlapped, least[static_cast<std::size_t>(manager.rank())]) << text(all);
  });
}

TEST(DeviceOverlap, StagesSendWhileTheyCompute) {
  // All but the last of four are sent beside what follows, outputs by the first rank and gradients
  // by the second.
  pipeline_overlaps(schedule_gpipe(2, 4), {3, 3});
  // The first rank is before each of its backwards in need of a gradient that comes behind what it
  // has sent.
  pipeline_overlaps(schedule_1f1b(2, 4), {2, 3});
}

}  // namespace
}  // namespace tessera::test
