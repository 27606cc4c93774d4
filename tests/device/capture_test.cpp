// Steps that are recorded for a graph on the stand-in device and made again: what needs no other
// rank; the rest is refused.

#include "capture.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../mesh/refused.h"
#include "../support/old_libtorch.h"
#include "support.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/tensor/shard_tensor.h"
#include "transport.h"

namespace tessera::test {
namespace {

using stand_in::Graph;

TEST(DeviceCapture, StepsOfShardsAreMadeAgain) {
  stand_in::on_devices(2, [](DistributedManager& manager) {
    at::set_num_threads(1);
    test::seed(3);
    const c10::Device on = manager.device();
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    const auto sharded = [&](const at::Tensor& t, Placement p) {
      return distribute_tensor(t.to(on), mesh, {p}).detach();
    };
    const at::Tensor x = sharded(randn({7, 6}, at::kDouble), Shard(0)).requires_grad_(),
                     w = sharded(randn({4, 6}, at::kDouble), Replicate()),
                     b = sharded(randn({4}, at::kDouble), Replicate());
    const auto step = [&] {
      const at::Tensor y = at::layer_norm(at::gelu(at::linear(x, w, b)), {4});
      return std::vector<at::Tensor>{
          y.detach(), torch::autograd::grad({y}, {x}, {at::ones_like(y).mul(y.detach())})[0]};
    };
    for (int i = 0; i < 2; ++i) step();
    Graph graph(on.index());
    const std::vector<at::Tensor> recorded = step();
    graph.end();
    EXPECT_GT(graph.tasks(), 5U);
    for (int i = 0; i < 3; ++i) {
      at::Tensor local = to_local(x.detach());
      local.copy_(randn(local.sizes(), at::kDouble).to(on));
      const std::vector<at::Tensor> wanted = step();
      for (const at::Tensor& t : recorded) to_local(t).fill_(7);
      graph.replay();
      for (std::size_t k = 0; k < wanted.size(); ++k)
        EXPECT_TRUE(at::equal(to_local(recorded[k]).cpu(), to_local(wanted[k]).cpu())) << k;
    }
  });
  EXPECT_EQ(stand_in::take_faults(), "");
}

TEST(DeviceCapture, WhatNeedsOtherRanksIsRefused) {
  if (kOldLibtorch) GTEST_SKIP() << "this libtorch does not say that a stream is captured";
  stand_in::on_devices(2, [](DistributedManager& manager) {
    at::set_num_threads(1);
    const c10::Device on = manager.device();
    const Group world = manager.world();
    const at::TensorOptions here = at::TensorOptions(on).dtype(at::kDouble);
    const at::Tensor t = at::ones({4}, here), half = at::ones({2}, here);
    torch::nn::Linear net(4, 2);
    net->to(on, at::kDouble);
    DistributedDataParallel ddp(net, world);
    const int other = 1 - manager.rank();
    const std::pair<const char*, std::function<void()>> all[] = {
        {"all_reduce", [&] { world.all_reduce(t); }},
        {"all_reduce", [&] { world.started().all_reduce(t).wait(); }},
        {"broadcast", [&] { world.broadcast(t, 0); }},
        {"all_gather", [&] { world.all_gather(t, half); }},
        {"exchange",
         [&] {
           world.exchange({{Message::Kind::send, half, other},
                           {Message::Kind::receive, t.narrow(0, 0, 2), other}});
         }},
        {"'gradients'", [&] { ddp(at::ones({3, 4}, here)).sum().backward(); }},
    };
    for (const auto& [call, make] : all) {
      if (std::string(call) != "'gradients'") make();  // plans are agreed
      Graph graph(on.index());
      const auto said = refused<InvalidArgument>(make);
      graph.end();
      EXPECT_NE(said.find(call), std::string::npos) << said;
      EXPECT_NE(said.find("is captured for a graph"), std::string::npos) << said;
    }
    // Nothing was sent, and the group goes on.
    const at::Tensor sum = at::ones({3}, here);
    world.all_reduce(sum);
    EXPECT_TRUE(sum.cpu().eq(2).all().item<bool>());
    Graph graph(on.index());
    EXPECT_THROW(half.sum().item(), c10::Error);
  });
  // Within an operator of sharded tensors too; that ends the group, as whatever fails there.
  stand_in::on_devices(2, [](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    const at::TensorOptions here = at::TensorOptions(manager.device());
    const at::Tensor field = distribute_tensor(at::ones({1, 1, 8, 4}, here), mesh, {Shard(2)}),
                     kernel = at::ones({1, 1, 3, 3}, here);
    at::conv2d(field, kernel, {}, 1, 1);
    Graph graph(manager.device().index());
    const auto said = refused<InvalidArgument>([&] { at::conv2d(field, kernel, {}, 1, 1); });
    EXPECT_NE(said.find("exchange 'halo'"), std::string::npos) << said;
    EXPECT_NE(said.find("is captured for a graph"), std::string::npos) << said;
  });
  EXPECT_EQ(stand_in::take_faults(), "");
}

}  // namespace
}  // namespace tessera::test
