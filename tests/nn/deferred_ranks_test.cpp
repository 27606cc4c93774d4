// Deferred construction on ranks that are processes: a model four times as large as what a rank may
// take.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

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

// Pages that this process has mapped, in bytes.
std::int64_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

// The limit is on the address space, as a batch system sets it.
TEST(DeferredRanks, AModelFourTimesTheLimitIsMade) {
  auto manager = DistributedManager::initialize({.timeout = std::chrono::seconds(60)});
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  manual_seed(manager, 3);
  constexpr int kLayers = 64;
  constexpr std::int64_t kWidth = 1024;
  constexpr std::int64_t kWhole = kLayers * kWidth * kWidth * 4;  // 256 MiB
  // Room for a quarter of the model beside what the process has mapped, and a little for the rest.
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &limit), 0);
  limit.rlim_cur = static_cast<rlim_t>(mapped_bytes() + kWhole / 4 + (96 << 20));
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  EXPECT_ANY_THROW(layers(kLayers, kWidth)) << "whole, it does not fit";
  auto net = deferred([] { return layers(kLayers, kWidth); });
  fully_shard(*net, mesh, {.units = {"*"}});
  const at::Tensor x = distribute_tensor(at::ones({4, kWidth}), mesh, {Shard(0)});
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(std::isfinite(net->forward(x).mean().item<float>()));
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
