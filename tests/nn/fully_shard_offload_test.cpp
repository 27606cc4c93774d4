// Offload of fully_shard() on a GPU, and what is refused without one. On a device that stands in
// for one: fully_shard_offload_ranks_test.cpp.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "fully_shard_offload_case.h"

namespace tessera::test::fully_shard_offload_test {

TEST(FullyShardOffload, CudaTrainsLikeOneProcess) {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA) || at::detail::getCUDAHooks().deviceCount() == 0)
    GTEST_SKIP() << "no CUDA device";
  on_threads(1, [](DistributedManager& manager) {
    Draw draw(71);
    train_offloaded(draw, 4, c10::Device(c10::kCUDA, 0),
                    [&] { return manager.mesh({{"a", 1}, {"b", 1}}); });
    Net net = net_of({});
    fully_shard(*net, manager.mesh({{"a", 1}}),
                {.offload = {.to_host = true, .device = c10::Device(c10::kCUDA, 0)}});
    EXPECT_TRUE(to_local(net->last.detach()).is_pinned());
  });
}

TEST(FullyShardOffload, IsRefusedOnEveryRankWhereItCannotBe) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({});
    EXPECT_THROW(fully_shard(*net, mesh, {.offload = {.to_host = true}}), InvalidArgument)
        << "the manager's device is the CPU";
    EXPECT_THROW(fully_shard(*net, mesh,
                             {.offload = {.to_host = true, .device = c10::Device(c10::kIPU, 0)}}),
                 NotAvailable);
    const OffloadOptions mine{.to_host = manager.rank() == 0};
    EXPECT_THROW(fully_shard(*net, mesh, {.offload = mine}), Error);
    EXPECT_FALSE(is_sharded(net->last)) << "nothing has changed";
    fully_shard(*net, mesh, {.offload = {.device = c10::Device(c10::kIPU, 0)}});
    EXPECT_TRUE(is_sharded(net->last)) << "a device alone asks for nothing";
  });
}

}  // namespace tessera::test::fully_shard_offload_test
