// Offload of fully_shard() on a device that stands in for one, on ranks that are processes: shards
// in host memory, computing on the device, equal to one process.

#include <unistd.h>

#include "device.h"
#include "fully_shard_offload_case.h"
#include "tessera/checkpoint/file.h"
#include "tessera/comm/job/manager.h"
#include "transport.h"

namespace tessera::test {

using stand_in::kDevice;

DistributedManager& job() {
  static std::optional<DistributedManager> manager;
  if (!manager) {
    ManagerOptions options;
    options.timeout = std::chrono::seconds(60);
    manager = DistributedManager::initialize(options);
    stand_in::serve(*manager, kDevice, "gloo");
  }
  return *manager;
}

DeviceMesh flat_mesh() { return job().mesh({{"x", job().world_size()}}); }

FullyShardOptions offloaded(FullyShardOptions options = {}) {
  options.offload = {.to_host = true, .device = kDevice};
  return options;
}

TEST(FullyShardOffloadRanks, TrainsLikeOneProcess) {
  Draw draw(53);
  seed(9);
  const int ranks = job().world_size();
  train_offloaded(draw, 6, kDevice, [&] {
    return draw.chance(50) ? job().mesh({{"a", 1}, {"b", ranks}})
                           : job().mesh({{"a", ranks}, {"b", 1}});
  });
  EXPECT_GT(stand_in::counters().copies_aside, 0) << "copies are started on a stream of their own";
}

TEST(FullyShardOffloadRanks, PrecisionIsThatOfShardsOnTheDevice) {
  const auto mesh = flat_mesh();
  const FullyShardOptions options{
      .precision = {.parameters = at::kFloat, .reduce = at::kFloat, .output = at::kDouble}};
  Net net = net_of({.tied = true}), expected = net_of({.tied = true});
  fully_shard(*net, mesh, offloaded(options));
  fully_shard(*expected, mesh, options);
  torch::optim::AdamW opt(once(*net), 0.01), expected_opt(once(*expected), 0.01);
  Draw draw(3), same(3);
  for (int step = 0; step < 4; ++step) {
    opt.zero_grad();
    expected_opt.zero_grad();
    const at::Tensor x = randn({5, 5}, at::kDouble);
    loss_of(net->forward(sharded_on(kDevice, draw, x, mesh))).backward();
    loss_of(expected->forward(sharded(same, x, mesh))).backward();
    expect_same_on_host(*net, *expected, concat("step ", step), 1e-5);
    opt.step();
    expected_opt.step();
    expect_offloaded(*net, opt, kDevice, "with a precision");
  }
}

TEST(FullyShardOffloadRanks, NothingOfTheParametersStaysOnTheDevice) {
  const auto mesh = flat_mesh();
  Net net = net_of({.width = 40, .hidden = 30, .blocks = 4});
  fully_shard(*net, mesh, offloaded());
  torch::optim::AdamW opt(once(*net), 0.01);
  std::int64_t all = 0, largest = 0;
  for (const auto& p : once(*net)) all += p.numel() * 8;
  for (const auto& block : net->blocks->children()) {
    std::int64_t unit = 0;
    for (const auto& p : block->parameters()) unit += p.numel() * 8;
    largest = std::max(largest, unit);
  }
  Draw draw(5);
  const std::int64_t before = stand_in::counters().bytes;
  for (int step = 0; step < 4; ++step) {
    {
      const at::Tensor x = sharded_on(kDevice, draw, randn({4, 5}, at::kDouble), mesh);
      if (step == 3) stand_in::counters().most_bytes = stand_in::counters().bytes.load();
      loss_of(net->forward(x)).backward();
    }
    EXPECT_EQ(stand_in::counters().bytes, before) << "after step " << step;
    opt.step();
    opt.zero_grad();
    EXPECT_EQ(stand_in::counters().bytes, before) << "after the update of step " << step;
  }
  // Gathered units, their shards, gradients of a unit that are packed or travel, activations: by
  // far not the model with its gradients, let alone its moments.
  EXPECT_GT(stand_in::counters().most_bytes - before, largest);
  EXPECT_LT(stand_in::counters().most_bytes - before, 2 * all);
}

TEST(FullyShardOffloadRanks, AStepCopiesShardsTwiceAndGradientsBack) {
  const auto mesh = flat_mesh();
  for (const bool reshard : {true, false}) {
    Net net = net_of({.width = 40, .hidden = 30, .blocks = 4});
    fully_shard(*net, mesh, offloaded({.reshard_after_forward = reshard}));
    torch::optim::AdamW opt(once(*net), 0.01);
    std::int64_t mine = 0;
    for (const auto& p : once(*net)) mine += to_local(p.detach()).numel() * 8;
    Draw draw(5);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = sharded_on(kDevice, draw, randn({4, 5}, at::kDouble), mesh);
      opt.zero_grad();
      stand_in::counters().copied_here = stand_in::counters().copied_back = 0;
      loss_of(net->forward(x)).backward();
      // The unit that ends forward begins backward, and stays. Of a buffer a sixteenth may be
      // padding; a number is copied where it is used.
      EXPECT_LE(stand_in::counters().copied_here, (reshard ? 2 : 1) * mine * 17 / 16 + 16)
          << "step " << step;
      EXPECT_GE(stand_in::counters().copied_here, mine) << "step " << step;
      EXPECT_EQ(stand_in::counters().copied_back, mine) << "step " << step;
      stand_in::counters().copied_here = stand_in::counters().copied_back = 0;
      opt.step();
      EXPECT_EQ(stand_in::counters().copied_here, 0) << "step " << step;
      EXPECT_EQ(stand_in::counters().copied_back, 0) << "step " << step;
    }
  }
}

TEST(FullyShardOffloadRanks, GoesOnAfterAnErrorThatOneRankAloneSaw) {
  const int ranks = job().world_size();
  if (ranks == 1) GTEST_SKIP() << "one rank has no others";
  const auto mesh = flat_mesh();
  for (const bool reshard : {true, false}) {
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh, offloaded({.reshard_after_forward = reshard}));
    Draw draw(5);
    seed(3);
    const auto step = [&](int i) {
      const at::Tensor x = randn({4, 5}, at::kDouble);
      for (Net* n : {&net, &expected})
        for (auto& p : (*n)->parameters()) p.mutable_grad().reset();
      loss_of(net->forward(sharded_on(kDevice, draw, x, mesh))).backward();
      loss_of(expected->forward(x)).backward();
      expect_same_on_host(*net, *expected, concat("step ", i));
      const at::NoGradGuard no_grad;
      for (Net* n : {&net, &expected})
        for (auto& p : once(**n)) p.sub_(p.grad(), 0.05);
    };
    for (int i = 0; i < 6; ++i) {
      step(i);
      if (i % 2 == 0) continue;
      at::Tensor index = at::zeros({ranks, 1}, at::kLong);
      index[i % ranks][0] = 7;
      const at::Tensor x = sharded_on(kDevice, draw, randn({4, 5}, at::kDouble), mesh);
      EXPECT_ANY_THROW({
        at::gather(distribute_tensor(at::ones({ranks, 3}), mesh, {Shard(0)}), 1,
                   distribute_tensor(index, mesh, {Shard(0)}));
        loss_of(net->forward(x)).backward();
        mesh.all().barrier();
      });
      mesh.all().barrier();
    }
  }
}

TEST(FullyShardOffloadRanks, NoSyncAccumulatesInHostMemory) {
  const auto mesh = flat_mesh();
  Net net = net_of({.tied = true}), expected = net_of({.tied = true});
  fully_shard(*net, mesh, offloaded());
  Draw draw(5);
  const std::int64_t before = stand_in::counters().bytes;
  for (int step = 0; step < 3; ++step) {
    for (int part = 0; part < 3; ++part) {
      const at::Tensor x = randn({4, 5}, at::kDouble);
      loss_of(expected->forward(x)).backward();
      {
        const std::optional<NoSync> scope = part < 2 ? std::optional(no_sync(*net)) : std::nullopt;
        loss_of(net->forward(sharded_on(kDevice, draw, x, mesh))).backward();
      }
      EXPECT_EQ(stand_in::counters().bytes, before) << "step " << step << " part " << part;
      for (const at::Tensor& p : once(*net)) {
        if (!p.grad().defined()) continue;
        EXPECT_TRUE(to_local(p.grad()).is_cpu()) << "step " << step << " part " << part;
      }
    }
    // What has been reduced is added to.
    expect_same_on_host(*net, *expected, concat("step ", step));
  }
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    table = register_module("table", torch::nn::Embedding(23, 6));
    head = register_module("head", Linear(6, 4));
  }
  at::Tensor forward(const at::Tensor& words) {
    return head->forward(table->forward(words).tanh());
  }
  torch::nn::Embedding table = nullptr;
  Linear head = nullptr;
};

TEST(FullyShardOffloadRanks, TablesThatStayAreLookedUpInHostMemory) {
  const auto mesh = flat_mesh();
  const auto net = std::make_shared<WordsImpl>(), expected = std::make_shared<WordsImpl>();
  for (const auto& n : {net, expected}) {
    n->to(at::kDouble);
    fill(*n, 8);
  }
  fully_shard(*net, mesh, offloaded({.stay = {"table.weight"}}));
  torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
  Draw draw(6);
  for (int step = 0; step < 3; ++step) {
    opt.zero_grad();
    expected_opt.zero_grad();
    const at::Tensor words = randint(23, {7, 2});
    const at::Tensor wanted = loss_of(expected->forward(words));
    const at::Tensor loss = loss_of(net->forward(sharded_on(kDevice, draw, words, mesh)));
    EXPECT_LT(difference(on_host(loss), wanted.detach()), 1e-10);
    wanted.backward();
    loss.backward();
    expect_same_on_host(*net, *expected, concat("step ", step));
    opt.step();
    expected_opt.step();
    expect_offloaded(*net, opt, kDevice, "a table");
  }
}

TEST(FullyShardOffloadRanks, SavesAndLoadsBesideShardsOnTheDevice) {
  const auto mesh = flat_mesh();
  // One name on all ranks.
  const std::string name = concat(::testing::TempDir(), "tessera_offload_", ::getpid());
  const std::string path = mesh.all().broadcast_bytes(name, 0, {}) + ".safetensors";
  Net net = net_of({.tied = true}), loaded = net_of({.tied = true}, 5),
      plain = net_of({.tied = true}, 6);
  fully_shard(*net, mesh, offloaded());
  fully_shard(*loaded, mesh, offloaded());
  fully_shard(*plain, mesh);
  const at::Tensor x = randn({4, 5}, at::kDouble);
  Draw draw(2), same(2), third(2);
  loaded->forward(sharded_on(kDevice, draw, x, mesh));  // gathered, and out of date afterwards
  save(*net, mesh, path);
  load(*loaded, mesh, path);
  load(*plain, mesh, path);
  mesh.all().barrier();
  if (job().rank() == 0) std::remove(path.c_str());
  const at::Tensor wanted = plain->forward(sharded(same, x, mesh));
  EXPECT_LT(
      difference(on_host(loaded->forward(sharded_on(kDevice, third, x, mesh))), on_host(wanted)),
      1e-10);
  expect_same_on_host(*loaded, *plain, "loaded");
}

TEST(FullyShardOffloadRanks, OperatorsComputeWhereTheirTensorsLie) {
  const auto mesh = flat_mesh();
  Linear net(4, 6);
  net->to(at::kDouble);
  fill(*net, 4);
  const at::Tensor weight = net->weight.detach().clone();
  fully_shard(*net, mesh, offloaded());
  const at::NoGradGuard no_grad;
  const at::Tensor& w = net->weight;
  const auto is_host = [](const at::Tensor& t) {
    return t.device() == kDevice && to_local(t).is_cpu();
  };
  EXPECT_TRUE(is_host(w * 2));
  EXPECT_TRUE(is_host(at::zeros_like(w, at::TensorOptions(kDevice))));
  EXPECT_TRUE(is_host(w.t()));
  EXPECT_EQ(w.to(at::kCPU).device(), at::kCPU);
  const at::Tensor there = from_local(
      at::ones(spec(w).local_shape(), at::TensorOptions(kDevice).dtype(at::kDouble)), spec(w));
  EXPECT_FALSE(is_host(w + there));
  EXPECT_FALSE(is_host(there + w));
  EXPECT_LT(difference(on_host(w + there), weight + 1), 1e-12);
  w.add_(there);
  EXPECT_TRUE(is_host(w));
  there.copy_(w);
  EXPECT_FALSE(is_host(there));
  EXPECT_LT(difference(on_host(there), weight + 1), 1e-12);
  EXPECT_LT(difference(on_host(redistribute(w, {Replicate()})), weight + 1), 1e-12);
  // Lists of both are taken one by one.
  at::_foreach_mul_({w, there}, 2.0);
  EXPECT_TRUE(is_host(w));
  EXPECT_LT(difference(on_host(w), 2 * (weight + 1)), 1e-12);
  EXPECT_LT(difference(on_host(there), 2 * (weight + 1)), 1e-12);
}

TEST(FullyShardOffloadRanks, AGroupWithoutABackendForTheDeviceIsRefused) {
  if (job().world_size() == 1) GTEST_SKIP() << "one rank needs no backend";
  // A group of its own, which does not serve the device.
  AxisGroupOptions own;
  own[{0}].backend = "gloo";
  const DeviceMesh mesh(Mesh({{"y", job().world_size()}}), job(), own);
  Net net = net_of({});
  EXPECT_THROW(fully_shard(*net, mesh, offloaded()), NotAvailable);
  EXPECT_FALSE(is_sharded(net->last));
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  tessera::test::job().shutdown();
  const std::string faults = tessera::test::stand_in::take_faults();
  std::fputs(faults.c_str(), stderr);
  return faults.empty() ? result : 1;
}
