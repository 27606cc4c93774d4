// Deferred construction on ranks that are processes: a model of four times what a rank may have.

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <optional>

#include "../support/sanitized.h"
#include "support.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/generators.h"

namespace tessera::test {

namespace {

namespace nn = torch::nn;

nn::Sequential layers(int count, std::int64_t width) {
  nn::Sequential net;
  for (int i = 0; i < count; ++i) net->push_back(nn::Linear(nn::LinearOptions(width, width)));
  return net;
}

// Of /proc/self/status, in bytes: "VmSize", "VmHWM" (the most that was resident).
std::int64_t status(const std::string& what) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(what + ":")) return std::stoll(line.substr(what.size() + 1)) << 10;
  }
  throw Error("no ", what);
}

// What is resident at most from now on.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

constexpr int kLayers = 128;
constexpr std::int64_t kWidth = 1024, kRows = 4;
constexpr std::int64_t kWhole = kLayers * kWidth * kWidth * 4;  // 512 MiB

// A way to place layers of the recorded model, and what it computes then.
struct Way {
  std::string name;
  std::function<at::Tensor(nn::Sequential net, int layers)> place;
};

// Gives the mean of what the placed net makes of ones.
at::Tensor mean_of(nn::Sequential net, const DeviceMesh& mesh, const Placement& rows) {
  return net->forward(distribute_tensor(at::ones({kRows, kWidth}), mesh, {rows})).mean();
}

std::vector<Way> ways(DistributedManager& manager, const DeviceMesh& mesh) {
  const int ranks = manager.world_size();
  const auto odd_and_even = [](int layers, const auto& even, const auto& odd) {
    std::vector<std::pair<std::string, std::decay_t<decltype(even)>>> all;
    for (int i = 0; i < layers; ++i) all.emplace_back(std::to_string(i), i % 2 == 0 ? even : odd);
    return all;
  };
  return {
      {"fully_shard",
       [=](nn::Sequential net, int) {
         fully_shard(*net, mesh, {.units = {"*"}});
         return mean_of(net, mesh, Shard(0));
       }},
      {"distribute_module",
       [=](nn::Sequential net, int) {
         distribute_module(*net, mesh, {{"*", {{Shard(0)}}}});
         return mean_of(net, mesh, Shard(0));
       }},
      {"tensor_parallel",
       [=](nn::Sequential net, int layers) {
         tensor_parallel(*net, mesh, odd_and_even(layers, column(), row()), {.axis = "x"});
         return mean_of(net, mesh, Replicate());
       }},
      {"Pipeline",
       [=](const nn::Sequential& net, int layers) {
         std::vector<int> cuts;
         for (int r = 1; r < ranks; ++r) cuts.push_back(r * layers / ranks);
         const auto stages = split_sequential(net, cuts);
         Pipeline pipeline(mesh, "x", schedule_gpipe(ranks, 1),
                           {make_stage(stages[static_cast<std::size_t>(mesh.coordinate()[0])])},
                           [](const auto& out, const auto&) { return out[0].mean(); });
         const at::Tensor ones = at::ones({kRows, kWidth});
         return at::scalar_tensor(pipeline.evaluate(split_batch({ones}, {ones}, 1)).loss);
       }},
  };
}

}  // namespace

// The limit is on the address space, as a batch system sets it: a quarter of the model. Each way
// holds a rank's share, and what one parameter takes beside it, and computes what the others do.
TEST(DeferredRanks, AModelThatFitsOnNoneIsMade) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer has an allocator of its own, with holes";
  auto manager = DistributedManager::initialize({.timeout = std::chrono::seconds(60)});
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  // Else the allocator keeps holes of a parameter's size between the shards.
  ASSERT_EQ(::mallopt(M_MMAP_THRESHOLD, 128 << 10), 1);
  // And each thread would reserve addresses for an arena of its own.
  ASSERT_EQ(::mallopt(M_ARENA_MAX, 1), 1);
  const std::vector<Way> all = ways(manager, mesh);
  const int ranks = manager.world_size();
  const torch::NoGradGuard no_grad;
  // Threads, their stacks and what the library keeps are there before, and not of the model.
  for (const Way& way : all) way.place(deferred([&] { return layers(ranks, kWidth); }), ranks);
  const std::int64_t share = kWhole / ranks;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &limit), 0);
  limit.rlim_cur = static_cast<rlim_t>(status("VmSize") + kWhole / 4);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  std::optional<double> mean;
  for (const Way& way : all) {
    manual_seed(manager, 3);
    forget_peak();
    const std::int64_t before = status("VmHWM");
    const double made =
        way.place(deferred([] { return layers(kLayers, kWidth); }), kLayers).item<double>();
    const std::int64_t peak = status("VmHWM") - before;
    EXPECT_GT(peak, share - (8 << 20)) << way.name;
    EXPECT_LT(peak, share + (24 << 20)) << way.name;
    if (manager.rank() == 0)
      std::printf("%s: a rank's share is %ld MiB, its peak %ld MiB\n", way.name.c_str(),
                  static_cast<long>(share >> 20), static_cast<long>(peak >> 20));
    EXPECT_NEAR(made, mean.value_or(made), 1e-6) << way.name;
    mean = made;
  }
  EXPECT_ANY_THROW(layers(kLayers, kWidth)) << "whole, it does not fit";
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
