// Training on the stand-in device beside one process on the CPU: data-parallel, fully sharded with
// and without offload, pipelined, by the trainer; checkpoints of it and loaders for it.

#include "../nn/data_parallel_case.h"
#include "../nn/fully_shard_offload_case.h"
#include "../pipeline/pipeline_support.h"
#include "../support/folder.h"
#include "device.h"
#include "tessera/checkpoint/file.h"
#include "tessera/data/dataset.h"
#include "tessera/data/loader.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/train/batch_source.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"
#include "transport.h"

namespace tessera::test {
namespace {

using stand_in::counters;
using stand_in::kDevice;
using stand_in::on_devices;
using stand_in::take_faults;

std::uint64_t next_seed() {
  static std::uint64_t one = 0;
  return ++one;
}

// The body on 1 to `most` ranks; afterwards nothing may have been found wrong.
void on_ranks(int most, const std::function<void(DistributedManager&, std::uint64_t)>& body) {
  for (int ranks = 1; ranks <= most; ++ranks) {
    const std::uint64_t with = next_seed();
    stand_in::reseed(with);
    on_devices(ranks, [&](DistributedManager& manager) {
      at::set_num_threads(1);
      test::seed(0);
      body(manager, with);
    });
    EXPECT_EQ(take_faults(), "") << ranks << " ranks, seed " << with;
  }
}

std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) all.push_back(whole(p).cpu());
  return all;
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                  const std::string& what, double limit = 1e-10) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LT(difference(got[i], expected[i], 1e-3), limit) << what << " " << i;
}

torch::nn::Sequential net_of_layers() {
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(at::kDouble);
  fill(*net, 11);
  return net;
}

// Rows of a step: of one process all, of a rank its own, some none.
at::Tensor rows_of(std::uint64_t step, int rank, int ranks) {
  test::seed(step);
  return testing::part(randn({13, 6}, at::kDouble), static_cast<int>(step), rank, ranks);
}

TEST(DeviceTraining, DataParallelEqualsOneProcess) {
  on_ranks(3, [](DistributedManager& manager, std::uint64_t) {
    const int me = manager.rank(), ranks = manager.world_size();
    auto net = net_of_layers(), expected = net_of_layers();
    net->to(manager.device());
    DistributedDataParallelOptions options;
    options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 256;
    DistributedDataParallel ddp(net, manager.world(), options);
    torch::optim::Adam optimizer(net->parameters(), 1e-2), wanted(expected->parameters(), 1e-2);
    for (std::uint64_t step = 0; step < 4; ++step) {
      const at::Tensor x = rows_of(step, me, ranks).to(manager.device()), all = rows_of(step, 0, 1);
      optimizer.zero_grad();
      wanted.zero_grad();
      // A rank may have none: then its loss counts nothing.
      ddp.mean_loss(torch::mse_loss(ddp(x), testing::target(x)), static_cast<double>(x.size(0)))
          .backward();
      torch::mse_loss(expected->forward(all), testing::target(all)).backward();
      optimizer.step();
      wanted.step();
    }
    expect_close(values_of(*net), values_of(*expected), "parameter");
  });
}

TEST(DeviceTraining, FullyShardedEqualsOneProcess) {
  on_ranks(3, [](DistributedManager& manager, std::uint64_t with) {
    const DeviceMesh mesh = manager.mesh({{"x", manager.world_size()}});
    for (const bool reshard : {true, false}) {
      Net net = net_of({.tied = true}), expected = net_of({.tied = true});
      net->to(manager.device());
      net->last = net->first->weight;
      fully_shard(*net, mesh, {.reshard_after_forward = reshard});
      torch::optim::AdamW opt(once(*net), 0.01), wanted(once(*expected), 0.01);
      Draw draw(with), same(with);
      for (int step = 0; step < 3; ++step) {
        opt.zero_grad();
        wanted.zero_grad();
        const at::Tensor x = randn({5, 5}, at::kDouble);
        loss_of(net->forward(sharded_on(manager.device(), draw, x, mesh))).backward();
        loss_of(expected->forward(x)).backward();
        const double norm = clip_gradients(net->parameters(), mesh.all(), {.max_norm = 0.3});
        EXPECT_NEAR(norm, clip_plainly(once(*expected), 0.3), 1e-9);
        opt.step();
        wanted.step();
      }
      expect_close(values_of(*net), values_of(*expected), reshard ? "resharded" : "kept");
    }
  });
}

// How often the host waited for the device in steps that all ranks make, once the first are over.
std::int64_t waits_of(DistributedManager& manager, const std::function<void()>& step) {
  const Group world = manager.world();
  for (int i = 0; i < 3; ++i) step();
  world.barrier();
  const std::int64_t before = counters().waits;
  world.barrier();
  for (int i = 0; i < 3; ++i) step();
  world.barrier();
  const std::int64_t after = counters().waits;
  world.barrier();
  return after - before;
}

TEST(DeviceTraining, StepsMakeNoHostWait) {
  on_ranks(3, [](DistributedManager& manager, std::uint64_t) {
    const c10::Device on = manager.device();
    auto net = net_of_layers();
    net->to(on);
    DistributedDataParallel ddp(net, manager.world());
    torch::optim::SGD sgd(net->parameters(), 1e-2);
    const at::Tensor x = randn({4, 6}, at::kDouble).to(on), y = randn({4, 2}, at::kDouble).to(on);
    EXPECT_EQ(waits_of(manager,
                       [&] {
                         sgd.zero_grad();
                         torch::mse_loss(ddp(x), y).backward();
                         sgd.step();
                       }),
              0)
        << "data-parallel";
    const DeviceMesh mesh = manager.mesh({{"x", manager.world_size()}});
    Net sharded_net = net_of({});
    sharded_net->to(on);
    fully_shard(*sharded_net, mesh);
    torch::optim::SGD other(once(*sharded_net), 1e-2);
    Draw draw(1);
    const at::Tensor rows = sharded_on(on, draw, randn({5, 5}, at::kDouble), mesh);
    EXPECT_EQ(waits_of(manager,
                       [&] {
                         other.zero_grad();
                         loss_of(sharded_net->forward(rows)).backward();
                         other.step();
                       }),
              0)
        << "fully sharded";
    const at::Tensor field =
        distribute_tensor(randn({1, 2, 9, 6}, at::kDouble).to(on), mesh, {Shard(2)});
    const at::Tensor kernel = randn({2, 2, 3, 3}, at::kDouble).to(on).requires_grad_();
    EXPECT_EQ(waits_of(manager,
                       [&] {
                         kernel.mutable_grad().reset();
                         at::conv2d(field, kernel, {}, 1, 1).relu().square().sum().backward();
                       }),
              0)
        << "convolution of a field";
  });
}

TEST(DeviceTraining, TensorParallelEqualsOneProcess) {
  on_ranks(3, [](DistributedManager& manager, std::uint64_t with) {
    const DeviceMesh mesh = manager.mesh({{"tensor", manager.world_size()}});
    auto net = net_of_layers(), expected = net_of_layers();
    net->to(manager.device());
    const bool along = with % 2 == 0;
    tensor_parallel(*net, mesh, {{"0", column()}, {"2", row()}},
                    {.sequence_dim = along ? std::optional<int>(0) : std::nullopt});
    torch::optim::AdamW opt(net->parameters(), 0.01), wanted(expected->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      opt.zero_grad();
      wanted.zero_grad();
      const at::Tensor x = randn({7, 6}, at::kDouble);
      loss_of(net->forward(distribute_tensor(x.to(manager.device()), mesh, {Replicate()})))
          .backward();
      loss_of(expected->forward(x)).backward();
      opt.step();
      wanted.step();
    }
    expect_close(values_of(*net), values_of(*expected), along ? "along the sequence" : "whole");
  });
}

TEST(DeviceTraining, OffloadedEqualsOneProcess) {
  on_ranks(3, [](DistributedManager& manager, std::uint64_t with) {
    Draw draw(with);
    const int ranks = manager.world_size();
    train_offloaded(draw, 2, manager.device(), [&] { return manager.mesh({{"b", ranks}}); });
  });
}

TEST(DeviceTraining, PipelinesEqualOneProcess) {
  Draw draw(next_seed());
  for (int i = 0; i < 6; ++i) {
    const int ranks = draw.between(1, 3);
    Case c = draw_case(draw, ranks, next_seed());
    c.marks.assign(c.marks.size(), false);  // those are made on the CPU
    const OneProcess expected = one_process(c);
    stand_in::reseed(c.seed);
    on_devices(ranks, [&](DistributedManager& manager) {
      const c10::Device on = manager.device();
      OwnStages own(c, manager.rank());
      for (const auto& [s, stage] : own.by_number) stage->to(on);
      PipelineBatch batch = c.batch();
      for (auto* lists : {&batch.inputs, &batch.targets})
        for (auto& list : *lists)
          for (at::Tensor& t : list) t = t.to(on);
      Pipeline pipeline(manager.mesh({{"pipe", ranks}}), "pipe", c.schedule, own.stages, mean_of,
                        {.skips = c.skips});
      for (int step = 0; step < 2; ++step) {
        for (const auto& [s, stage] : own.by_number) stage->zero_grad();
        const auto result = pipeline.step(batch);
        EXPECT_NEAR(result.loss, expected.loss, 1e-11 * std::abs(expected.loss)) << c.text();
        for (const auto& [s, stage] : own.by_number) {
          std::size_t k = 0;
          for (const at::Tensor& p : stage->parameters()) {
            const at::Tensor& wanted = expected.gradients[static_cast<std::size_t>(s)][k++];
            const at::Tensor got = p.grad().defined() ? p.grad().cpu() : at::zeros_like(wanted);
            EXPECT_LT(difference(got, wanted, 1e-3), 1e-10) << c.text();
          }
        }
      }
    });
    EXPECT_EQ(take_faults(), "") << c.text();
  }
}

// A task of the trainer, of rows that each rank draws for itself.
struct Regress : Task {
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::Adam>(net->parameters(), 0.02)};
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    const at::Tensor loss = torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
    step.log("mse", loss.detach());
    return loss;
  }
  torch::nn::Sequential net = net_of_layers();
};

TEST(DeviceTraining, TheTrainerGoesOnTheDeviceAsOnTheCpu) {
  for (const bool clips : {false, true})
    on_ranks(3, [&](DistributedManager& manager, std::uint64_t) {
      const int ranks = manager.world_size();
      const auto batches = [&](int rank, int of) {
        return batches_of([=](std::uint64_t epoch, std::uint64_t i) -> std::optional<MicroBatch> {
          if (i >= 4) return std::nullopt;
          const at::Tensor x = rows_of(epoch * 4 + i, rank, of);
          return make_batch({x, testing::target(x)});
        });
      };
      Regress task, expected;
      TrainerOptions options;
      options.max_epochs = 2;
      options.accumulate = 2;
      options.session.signals = false;
      if (clips) options.session.clip.max_norm = 0.1;
      TrainerOptions alone = options;
      options.strategy = std::make_shared<DDPStrategy>(manager);
      Trainer(options).fit(task, batches(manager.rank(), ranks));
      EXPECT_EQ(task.net->parameters()[0].device(), manager.device());
      Trainer(alone).fit(expected, batches(0, 1));
      expect_close(values_of(*task.net), values_of(*expected.net), "trained");
    });
}

TEST(DeviceTraining, CheckpointsComeFromAndGoToTheDevice) {
  const testing::Folder folder;
  on_ranks(3, [&](DistributedManager& manager, std::uint64_t with) {
    const DeviceMesh mesh = manager.mesh({{"x", manager.world_size()}});
    const std::string path = folder / concat(with, ".safetensors");
    Net net = net_of({}), other = net_of({}, 5), plain = net_of({}, 6);
    for (Net* one : {&net, &other}) {
      (*one)->to(manager.device());
      fully_shard(**one, mesh);
    }
    save(*net, mesh, path);
    load(*other, mesh, path);
    load(*plain, mesh, path);
    expect_close(values_of(*other), values_of(*net), "loaded on the device");
    expect_close(values_of(*plain), values_of(*net), "loaded on the CPU");
    for (const auto& [name, t] : load(mesh, path)) EXPECT_EQ(t.device(), manager.device()) << name;
    mesh.all().barrier();
  });
}

TEST(DeviceLoading, BatchesAreCopiedAheadAndInTheirOrder) {
  const auto data = std::make_shared<TensorDataset>(std::vector<at::Tensor>{
      at::arange(60, at::kLong), at::arange(120, at::kDouble).view({60, 2})});
  const auto order = std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = 60, .seed = next_seed()}, BatchSchedule(7));
  for (const int workers : {0, 2})
    for (const bool pinned : {true, false}) {
      stand_in::reseed(next_seed());
      const BatchMapping mapping({1}, {0}, {0});
      Loader plain({data}, order, mapping, 0);
      Loader loader({data}, order, mapping, 0,
                    {.workers = workers, .pin_memory = pinned, .device = kDevice});
      const auto unpinned = counters().unpinned.load(), waits = counters().waits.load();
      std::vector<at::Tensor> sums;
      for (int i = 0; i < 20; ++i) {
        const LoadedBatch batch = loader.next();
        EXPECT_EQ(batch.tensors[0].device(), kDevice);
        sums.push_back(batch.tensors[0].to(at::kDouble).sum() + batch.tensors[1].sum());
      }
      EXPECT_EQ(counters().waits, waits) << "a loader makes nobody wait";
      EXPECT_EQ(counters().unpinned > unpinned, !pinned);
      for (int i = 0; i < 20; ++i) {
        const LoadedBatch batch = plain.next();
        const double wanted =
            batch.tensors[0].sum().item<double>() + batch.tensors[1].sum().item<double>();
        EXPECT_EQ(sums[static_cast<std::size_t>(i)].item<double>(), wanted);
      }
      EXPECT_EQ(take_faults(), "");
    }
}

}  // namespace
}  // namespace tessera::test
