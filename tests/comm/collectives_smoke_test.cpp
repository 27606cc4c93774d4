// First calls: every collective once, over ranks as threads.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/threads.h"
#include "tessera/comm/types.h"

namespace tessera {
namespace {

class Smoke : public testing::TestWithParam<std::string> {};

TEST_P(Smoke, EveryCollectiveOnce) {
  ManagerOptions options;
  options.backend = GetParam();
  options.timeout = std::chrono::seconds(20);
  run_threads(3, [](DistributedManager& manager) {
    const auto world = manager.world();
    const int me = world.rank();
    auto t = torch::full({4}, me + 1.0);
    world.all_reduce(t);
    EXPECT_TRUE(t.equal(torch::full({4}, 6.0)));
    auto all = torch::empty({5, 2});
    const Sizes sizes{3, 0, 2};
    world.all_gather(all, torch::full({sizes[me], 2}, me * 1.0), sizes);
    EXPECT_EQ(all.sum().item<double>(), 8.0);
    auto part = torch::empty({sizes[me], 2});
    world.reduce_scatter(part, all, ReduceOp::sum, sizes);
    EXPECT_EQ(part.sum().item<double>(), me == 2 ? 24.0 : 0.0);
    const auto got = world.all_gather_bytes(std::string(me, 'x'));
    EXPECT_EQ(got, (std::vector<std::string>{"", "x", "xx"}));
    auto b = torch::full({2}, me);
    world.broadcast(b, 2);
    EXPECT_EQ(b.sum().item<int>(), 4);
    auto request = world.start_all_reduce(b, ReduceOp::max);
    request.wait();
    world.barrier();
    if (me == 0) world.send(b, 1);
    if (me == 1) world.receive(b, 0);
  }, options);
}

INSTANTIATE_TEST_SUITE_P(Backends, Smoke, testing::Values("threads", "gloo"));

}  // namespace
}  // namespace tessera
