// Deferred construction on ranks that are processes: a model of four times what a rank may have.

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <cmath>
#include <fstream>

#include "support.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/fully_shard.h"

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
  throw Error(concat("no ", what));
}

}  // namespace

// The limit is on the address space, as a batch system sets it.
TEST(DeferredRanks, AModelThatFitsOnNoneIsMade) {
  auto manager = DistributedManager::initialize({.timeout = std::chrono::seconds(60)});
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  manual_seed(manager, 3);
  constexpr int kLayers = 128;
  constexpr std::int64_t kWidth = 1024;
  constexpr std::int64_t kWhole = kLayers * kWidth * kWidth * 4;  // 512 MiB
  // Else the allocator keeps holes of a parameter's size between the shards.
  ASSERT_EQ(::mallopt(M_MMAP_THRESHOLD, 128 << 10), 1);
  // And each thread would reserve addresses for an arena of its own.
  ASSERT_EQ(::mallopt(M_ARENA_MAX, 1), 1);
  // Threads, their stacks and what the library keeps are there before, and not of the model.
  {
    nn::Sequential small = layers(1, 8);
    fully_shard(*small, mesh, {.units = {"*"}});
    small->forward(distribute_tensor(at::ones({8, 8}), mesh, {Shard(0)})).sum().backward();
  }
  const std::int64_t share = kWhole / manager.world_size();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &limit), 0);
  limit.rlim_cur = static_cast<rlim_t>(status("VmSize") + kWhole / 4);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  const std::int64_t before = status("VmHWM");
  auto net = deferred([] { return layers(kLayers, kWidth); });
  fully_shard(*net, mesh, {.units = {"*"}});
  EXPECT_LT(status("VmHWM") - before, share + (24 << 20));
  const at::Tensor x = distribute_tensor(at::ones({4, kWidth}), mesh, {Shard(0)});
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(std::isfinite(net->forward(x).mean().item<float>()));
  EXPECT_ANY_THROW(layers(kLayers, kWidth)) << "whole, it does not fit";
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
