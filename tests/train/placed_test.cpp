// Batches whose fields lie differently, by name, and samples that a function augments: the trainer
// gives the parameters of one process. And strategies by name.

#include <algorithm>
#include <optional>

#include "../support/stock_gloo.h"
#include "placed_cases.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/generators.h"
#include "tessera/train/pipeline_strategy.h"
#include "tessera/train/strategies.h"

namespace tessera::test {

using ::tessera::testing::thrown;

TEST(BatchFields, ByNameTheTrainerHasTheParametersOfOneProcess) {
  for (int ranks = 1; ranks <= 4; ++ranks) on_threads(ranks, batch_fields_case);
}

// Batches in memory, of any numbers of rows and not equally many on each: what the ranks agree to
// fill up with is placed too.
TEST(BatchFields, RaggedBatchesAndRanksThatRunOut) {
  const auto source = [](int first, int last, bool reads, std::int64_t own) {
    return batches_of([=](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
      if (static_cast<std::int64_t>(index) >= own) return std::nullopt;
      MicroBatch batch;
      std::vector<at::Tensor> images, labels;
      for (int r = first; r < last; ++r) {
        // Of the rank's last batches nothing, where another rank goes on.
        const bool has = static_cast<std::int64_t>(index) < 3 + r % 2;
        const std::int64_t rows = has ? ragged_rows(r, static_cast<std::int64_t>(index)) + r : 0;
        at::Generator draws = at::detail::createCPUGenerator(100 * r + 10 * epoch + index);
        images.push_back(at::randn({rows, 2, kSide, 4}, draws, at::kDouble));
        labels.push_back(at::randn({rows, 3}, draws, at::kDouble));
        batch.rows = batch.real = batch.rows + rows;
      }
      if (!reads) return batch;
      batch.tensors = {at::cat(images), at::cat(labels)};
      batch.names = {"input/image", "label"};
      return batch;
    });
  };
  const auto options = [](std::shared_ptr<Strategy> strategy) {
    TrainerOptions all = with(std::move(strategy), 1);
    all.uneven = UnevenData::weight_zero;
    return all;
  };
  for (int rows = 1; rows <= 2; ++rows) {
    Classify alone;
    Trainer(options(nullptr)).fit(alone, source(0, rows, true, rows == 1 ? 3 : 4));
    on_threads(2 * rows, [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh(mapped({{"data", rows}, {"domain", 2}}));
      const int row = mesh.coordinate()[0];
      for (const Read read : {Read::complete, Read::one}) {
        const bool reads = read == Read::complete || reads_for_others(mesh, {"data"});
        Classify task(true);
        Trainer(options(std::make_shared<MeshStrategy>(mesh, NamedPlacements{},
                                                       image_placements(read))))
            .fit(task, source(row, row + 1, reads, 3 + row % 2));
        expect_near(task.values(), alone.values(),
                    concat(rows, " rows, reading ", static_cast<int>(read)));
      }
    });
  }
}

// A run goes on elsewhere, by ranks that read in another way.
TEST(BatchFields, ARunGoesOnWhereOneRankReads) {
  const ImageRun expected = images_alone();
  const Folder folder;
  struct Leg {
    int ranks, steps;
    Read read;
  };
  for (const Leg& leg : {Leg{2, 1, Read::one}, Leg{4, 3, Read::shards}, Leg{3, -1, Read::one}}) {
    on_threads(leg.ranks, [&](DistributedManager& manager) {
      const auto [ranks, steps, read] = leg;
      const DeviceMesh mesh = manager.mesh(image_meshes(ranks).back());
      const auto data = images_of_rank(mesh, read);
      const bool reads = read != Read::one || reads_for_others(mesh, {"data"});
      const auto mapping = batch_mapping(mesh.mesh(), {"data"});
      Loader loader({data}, image_order(), mapping, manager.rank(), {.workers = 1, .reads = reads});
      Classify task(true);
      TrainerOptions options = image_options(
          std::make_shared<MeshStrategy>(mesh, NamedPlacements{}, image_placements(read)));
      options.checkpoint.folder = folder.path();
      options.checkpoint.resume = true;
      options.max_steps = steps;
      options.validate_every_epochs = 0;
      options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
      Trainer(options).fit(task, batches_of(loader));
      if (steps < 0) expect_near(task.values(), expected.values, "resumed");
    });
  }
}

TEST(BatchFields, AugmentedSamplesAreThoseOfOneProcess) {
  const Augmentation by{.function =
                            [](Sample sample, const at::Generator& draws) {
                              const at::Tensor drawn = at::rand({2}, draws, at::kDouble);
                              if (drawn[0].item<double>() < 0.5) sample[0] = sample[0].flip(1);
                              sample[0] += at::randn(sample[0].sizes(), draws, at::kDouble);
                              sample[1] += drawn[1];
                              return sample;
                            },
                        .seed = 4};
  const ImageRun expected = images_alone(by);
  for (const int ranks : {1, 2, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh(image_meshes(ranks).back());
      const auto mapping = batch_mapping(mesh.mesh(), {"data"});
      const auto train = [&](Loader& loader, Read read,
                             std::function<MicroBatch(LoadedBatch)> make) {
        Classify task(true);
        TrainerOptions options = image_options(
            std::make_shared<MeshStrategy>(mesh, NamedPlacements{}, image_placements(read)));
        options.validate_every_epochs = 0;
        Trainer(options).fit(task, batches_of(loader, std::move(make)));
        expect_near(task.values(), expected.values, concat(ranks, " ranks"));
      };
      // Complete samples are augmented before they are sharded.
      for (const Read read : {Read::complete, Read::one}) {
        const bool reads = read == Read::complete || reads_for_others(mesh, {"data"});
        Loader loader({images_of_rank(mesh, read)}, image_order(), mapping, manager.rank(),
                      {.workers = 1, .augment = by, .reads = reads});
        train(loader, read, {});
      }
      // Shards are brought together for it, and sharded again.
      Loader shards({images_of_rank(mesh, Read::shards)}, image_order(), mapping, manager.rank());
      train(shards, Read::shards, [&](LoadedBatch loaded) {
        const ShardedBatch cut = augment_batch(
            shard_batch(loaded, mesh, {"data"}, image_placements(Read::shards).fields),
            loaded.samples, by);
        MicroBatch batch{std::move(loaded)};
        batch.tensors = cut.tensors;
        batch.mask = cut.mask;
        return batch;
      });
    });
  }
}

TEST(BatchFields, MistakesAreToldOnAllRanks) {
  on_threads(2, [](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 1}, {"domain", 2}});
    const auto make = [&](BatchFields fields) {
      return std::make_shared<MeshStrategy>(mesh, NamedPlacements{}, std::move(fields));
    };
    EXPECT_THROW(make({.rows = {"rows"}}), InvalidArgument);
    const std::vector<std::string> turned{"domain", "data"};
    EXPECT_THROW(make({.rows = turned}), InvalidArgument);
    const auto place = [&](const std::shared_ptr<MeshStrategy>& strategy, bool wrong_here,
                           const std::string& why) {
      MicroBatch batch{make_batch({at::ones({2, 2, kSide, 4}), at::ones({2, 3})})};
      batch.names = {"input/image", "label"};
      if (wrong_here) batch.tensors[0] = at::ones({3, 2, kSide, 4});
      const std::string said = thrown<InvalidArgument>([&] { strategy->place(batch); });
      EXPECT_NE(said.find(why), std::string::npos) << said;
    };
    const bool first = manager.rank() == 0;
    place(make(image_placements(Read::complete)), !first, "dim 0 has the rows");
    place(make(image_placements(Read::one)), first, "dim 0 has the rows");
    place(make({.rows = {"data"}, .fields = {{.field = "inputs"}}}), false, "'inputs'");
    place(make({.rows = {"data"}, .fields = {{.field = "label", .dims = {{"domain", 1}}}}}), false,
          "whole = true");
    place(make({.rows = {"data"},
                .fields = {{.field = "label", .dims = {{"domain", 2}}, .whole = true}}}),
          false, "dim 2");
  });
}

// ---- strategies by name ----

namespace {

/// A stage of small_net(), whatever made the strategy.
class Staged : public Task {
 public:
  NamedModules modules() override { return {{"net", part.ptr()}}; }
  void setup(Strategy& strategy) override {
    strategy_ = &dynamic_cast<PipelineStrategy&>(strategy);
    const auto parts = split_sequential(small_net(), std::vector<int>{2});
    part = parts[static_cast<std::size_t>(strategy.rank())];
  }
  Optimizers optimizers() override {
    const auto stage = make_stage(part.ptr(), [this](const std::vector<at::Tensor>& x) {
      return std::vector<at::Tensor>{part->forward(x[0])};
    });
    pipeline_ = strategy_->make_pipeline(
        schedule_1f1b(2, 2), {stage},
        [](const auto& out, const auto& target) { return torch::mse_loss(out[0], target[0]); });
    return {
        std::make_shared<torch::optim::Adam>(part->parameters(), torch::optim::AdamOptions(0.05))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    return run_pipeline(*pipeline_, strategy_->split(batch, 1, 2), step);
  }
  torch::nn::Sequential part;

 private:
  PipelineStrategy* strategy_ = nullptr;
  std::shared_ptr<Pipeline> pipeline_;
};

}  // namespace

TEST(StrategyRegistry, EachNameTrainsAsOneProcess) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto expected = alone(ranks, 4, 1, with(nullptr, 1));
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto registry = StrategyRegistry::builtin();
      for (const std::string& name : registry.names()) {
        if (name == "pipeline" || (name == "single" && ranks > 1)) continue;
        StrategyParts parts{.ranks = ranks};
        if (name == "mesh") parts.mesh = {{"data", kOpenAxis}}, parts.batch = {{"data", 0}};
        const auto strategy = registry.make(name, manager, parts);
        EXPECT_EQ(strategy->name(), name);
        EXPECT_EQ(strategy->size(), ranks);
        Regression task;
        std::optional<DistributedDataParallel<torch::nn::Sequential>> wrapped;
        if (name == "manual") wrapped.emplace(task.net, manager.world());
        Trainer(with(strategy, 1)).fit(task, ragged_batches(manager.rank(), 4));
        expect_near(task.values(), expected, concat(name, " on ", ranks, " ranks"));
      }
    });
  }
}

TEST(StrategyRegistry, APipelineByName) {
  const auto batches = [] {
    return batches_of([](std::uint64_t, std::uint64_t index) -> std::optional<MicroBatch> {
      if (index == 3) return std::nullopt;
      at::Generator own = at::detail::createCPUGenerator(index);
      const at::Tensor x = at::randn({4, 3}, own, at::kDouble);
      return make_batch({x, at::randn({4, 2}, own, at::kDouble)});
    });
  };
  Regression one;
  Trainer(with(nullptr, 1)).fit(one, batches());
  const auto expected = one.net->named_parameters();
  on_threads(2, [&](DistributedManager& manager) {
    const auto strategy =
        StrategyRegistry::builtin().make("pipeline", manager, {.ranks = 2, .mesh = {{"stage", 2}}});
    Staged task;
    Trainer(with(strategy, 1)).fit(task, batches());
    EXPECT_EQ(task.part->named_parameters().size(), 2U);
    for (const auto& p : task.part->named_parameters())
      EXPECT_LT(difference(p.value(), expected[p.key()]), 1e-10) << p.key();
  });
}

TEST(StrategyRegistry, WhatAStrategyLacksOrDoesNotTakeIsRefused) {
  on_threads(2, [](DistributedManager& manager) {
    auto registry = StrategyRegistry::builtin();
    const auto refusal = [&](const std::string& name, const StrategyParts& parts) {
      return thrown<InvalidArgument>([&] { registry.make(name, manager, parts); });
    };
    EXPECT_NE(refusal("fsdp9", {}).find("[ddp, manual, mesh, pipeline, process_group, single]"),
              std::string::npos);
    EXPECT_NE(refusal("ddp", {.ranks = 3}).find("with 3 ranks, and the job has 2"),
              std::string::npos);
    EXPECT_NE(refusal("ddp", {.ranks = -1}).find("-1 ranks"), std::string::npos);
    EXPECT_NE(refusal("ddp", {.mesh = {{"data", 2}}}).find("takes no mesh"), std::string::npos);
    EXPECT_NE(refusal("mesh", {}).find("needs a mesh"), std::string::npos);
    EXPECT_NE(refusal("pipeline", {}).find("needs a mesh"), std::string::npos);
    EXPECT_NE(refusal("pipeline", {.mesh = {{"stages", 2}}}).find("'stage'"), std::string::npos);
    EXPECT_NE(
        refusal("mesh", {.mesh = {{"data", 2}}, .batch = {{"domain", 0}}}).find("no axis 'domain'"),
        std::string::npos);
    EXPECT_NE(refusal("mesh", {.mesh = {{"data", 2}}, .batch = {{"data", -1}}}).find("dim -1"),
              std::string::npos);
    EXPECT_NE(refusal("mesh", {.mesh = {{"data", 2}},
                               .batch = {{"data", 0}},
                               .fields = BatchFields{.rows = {"data"}}})
                  .find("and the fields of one"),
              std::string::npos);
    EXPECT_NE(refusal("single", {}).find("2 ranks"), std::string::npos);
  });
}

// ---- a group of the program's own ----

// All ranks save: random states and running sums of each are in a checkpoint, which any ranks load.
TEST(ProcessGroups, AllRanksSaveAndAnyRanksGoOn) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const Folder folder;
    const auto all = alone(ranks, 6, 1, with(nullptr, 1));
    for (const int steps : {5, 9, -1}) {
      const auto store = c10::make_intrusive<c10d::HashStore>();
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto strategy =
            std::make_shared<ProcessGroupStrategy>(stock_group(store, manager.rank(), ranks));
        EXPECT_TRUE(strategy->abilities().saves_on_all_ranks);
        Regression task(small_net(manager.rank() == 0 ? 11 : 12));
        TrainerOptions options = with(strategy, 1);
        options.max_steps = steps;
        options.checkpoint.folder = folder.path();
        options.checkpoint.resume = true;
        options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
        Trainer(options).fit(task, ragged_batches(manager.rank(), 6));
        if (steps < 0) expect_near(task.values(), all, concat(ranks, " ranks, resumed"));
        const CheckpointReader saved(manager.world(), folder.path(),
                                     steps < 0 ? "step-12" : concat("step-", steps));
        EXPECT_EQ(saved.saved_ranks(), ranks);
      });
    }
    // Another strategy on one process takes it over: nothing is left to do.
    Regression task(small_net(5));
    TrainerOptions options = with(nullptr, 1);
    options.checkpoint.folder = folder.path();
    options.checkpoint.resume = true;
    Trainer(options).fit(task, ragged_batches(0, 6));
    expect_near(task.values(), all, "taken over");
  }
}

// A group that has no store, or one of each rank's own.
TEST(ProcessGroups, ItsRanksMeetWithoutAStore) {
  const auto expected = alone(3, 4, 1, with(nullptr, 1));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(3, [&](DistributedManager& manager) {
    const auto met = stock_group(store, manager.rank(), 3);
    const auto bare = c10::make_intrusive<c10d::ProcessGroup>(manager.rank(), 3);
    bare->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                     met->getBackend(c10::DeviceType::CPU));
    bare->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    Regression task;
    Trainer(with(std::make_shared<ProcessGroupStrategy>(bare), 1))
        .fit(task, ragged_batches(manager.rank(), 4));
    expect_near(task.values(), expected, "a group without a store");
    EXPECT_THROW(ProcessGroupStrategy(c10::intrusive_ptr<c10d::ProcessGroup>()), InvalidArgument);
  });
}

}  // namespace tessera::test
