// Checkpoints of something else, options that differ between ranks: refused on every rank, before
// anything changes.

#include "trouble.h"

namespace tessera::test {

TEST(Hostile, ACheckpointOfSomethingElseIsRefusedBeforeAnythingChanges) {
  const Folder folder;
  class Custom : public Regression {
   public:
    Custom(torch::nn::Sequential net, int optimizers, int groups, bool sgd = false)
        : Regression(std::move(net)), optimizers_(optimizers), groups_(groups), sgd_(sgd) {}
    Optimizers optimizers() override {
      const auto p = net->parameters();
      const auto make =
          [&](std::vector<at::Tensor> some) -> std::shared_ptr<torch::optim::Optimizer> {
        if (sgd_) return std::make_shared<torch::optim::SGD>(some, 0.1);
        std::vector<torch::optim::OptimizerParamGroup> groups;
        for (int g = 0; g < groups_; ++g)
          groups.emplace_back(std::vector<at::Tensor>(
              some.begin() + g * static_cast<std::ptrdiff_t>(some.size()) / groups_,
              some.begin() + (g + 1) * static_cast<std::ptrdiff_t>(some.size()) / groups_));
        return std::make_shared<torch::optim::Adam>(groups, torch::optim::AdamOptions(0.05));
      };
      if (optimizers_ == 1) return {make(p)};
      return {make({p.begin(), p.begin() + 2}), make({p.begin() + 2, p.end()})};
    }

   private:
    int optimizers_, groups_;
    bool sgd_;
  };
  const auto fit = [&](DistributedManager& manager, Task& task) {
    auto options = saving(std::make_shared<DDPStrategy>(manager), folder.path());
    options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
    Trainer(options).fit(task, ragged_batches(manager.rank(), 4));
  };
  on_threads(2, [&](DistributedManager& manager) {
    Custom task(small_net(), 1, 2);
    fit(manager, task);
  });
  const auto smaller = [] {
    const auto full = small_net();
    torch::nn::Sequential net;
    net->push_back(std::dynamic_pointer_cast<torch::nn::LinearImpl>(full->ptr(0)));
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(5, 2).bias(false)));
    net->to(at::kDouble);
    fill(*net, 11);
    return net;
  };
  const auto refused = [&](const std::function<std::shared_ptr<Custom>()>& make,
                           const std::string& what) {
    expect_all_told(outcomes_on(2,
                                [&](DistributedManager& manager) {
                                  const auto task = make();
                                  const auto before = task->values();
                                  try {
                                    fit(manager, *task);
                                  } catch (...) {
                                    expect_equal(task->values(), before, what);
                                    throw;
                                  }
                                }),
                    what);
  };
  refused([&] { return std::make_shared<Custom>(smaller(), 1, 2); }, "another model");
  refused([] { return std::make_shared<Custom>(small_net(), 2, 2); }, "has 1 optimizers");
  refused([] { return std::make_shared<Custom>(small_net(), 1, 1); },
          "in group 1 there and in group 0 here");
  refused([] { return std::make_shared<Custom>(small_net(), 1, 1, true); }, "is Adam, this one is");
  // A network that has grown.
  refused(
      [] {
        auto net = small_net();
        net->push_back(torch::nn::Linear(2, 2));
        net->to(at::kDouble);
        fill(*net, 11);
        return std::make_shared<Custom>(net, 1, 2);
      },
      "is here alone");
}

TEST(Hostile, AnotherAccumulationOnResumeUsesEachBatchOnce) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    std::vector<std::int64_t> seen;
    const auto source = [&] {
      return batches_of([&](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
        if (i >= 7) return std::nullopt;
        return make_batch(ragged_data(manager.rank(), static_cast<std::int64_t>(i)));
      });
    };
    struct Sees : Regression {
      explicit Sees(std::vector<std::int64_t>& batches) : seen(batches) {}
      at::Tensor training_step(const MicroBatch& batch, Step& step) override {
        seen.push_back(step.epoch() * 7 + static_cast<std::int64_t>(batch.index));
        return Regression::training_step(batch, step);
      }
      std::vector<std::int64_t>& seen;
    };
    for (const int accumulate : {2, 3, 1}) {
      Sees task(seen);
      auto options = saving(std::make_shared<DDPStrategy>(manager), folder.path());
      options.accumulate = accumulate;
      options.max_steps = accumulate == 2 ? 2 : accumulate == 3 ? 4 : -1;
      options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
      const FitResult result = Trainer(options).fit(task, source());
      EXPECT_EQ(result.epochs, accumulate == 1 ? 2 : accumulate == 3 ? 1 : 0);
    }
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < 14; ++i) expected.push_back(i);
    EXPECT_EQ(seen, expected);
  });
}

// Ranks that would call each other a different number of times are told so, not left to wait.
TEST(Hostile, OptionsThatDifferBetweenRanksAreTold) {
  const auto fit = [](const std::function<void(TrainerOptions&, int rank)>& change,
                      bool validates) {
    return outcomes_on(3, [&](DistributedManager& manager) {
      Regression task;
      auto options = with(std::make_shared<DDPStrategy>(manager), 2);
      change(options, manager.rank());
      Trainer(options).fit(
          task, ragged_batches(manager.rank(), 5),
          validates && manager.rank() == 1 ? ragged_batches(manager.rank(), 2) : nullptr);
    });
  };
  const auto none = [](TrainerOptions&, int) {};
  expect_all_told(fit([](TrainerOptions& o, int rank) { o.max_steps = rank == 2 ? 30 : 3; }, false),
                  "ranks [0, 1] have \"max_steps 3\", rank 2 has \"max_steps 30\"");
  expect_all_told(fit([](TrainerOptions& o, int rank) { o.accumulate = 1 + rank / 2; }, false),
                  "ranks [0, 1] have \"accumulate 1\", rank 2 has \"accumulate 2\"");
  // Ranks whose factors of the loss part would add up gradients of different scales.
  expect_all_told(
      fit([](TrainerOptions& o, int rank) { o.session.scaler.backoff = rank == 1 ? 0.25 : 0.5; },
          false),
      "ranks [0, 2] have \"scaler.backoff 0.5\", rank 1 has \"scaler.backoff 0.25\"");
  expect_all_told(fit(none, true), "a validation source");
  expect_all_told(fit(
                      [](TrainerOptions& o, int rank) {
                        if (rank == 0) o.callbacks = {std::make_shared<LearningRateMonitor>()};
                      },
                      false),
                  "ranks [0] have \"a callback learning_rate\", rank 1 has nothing");
  for (const std::string& said : fit(none, false).said) EXPECT_EQ(said, "");
}

// Folders and what to resume from choose collective calls: they are compared before the first one,
// also where a strategy wants the checkpoint before its setup.
TEST(Hostile, FoldersAndResumingThatDifferBetweenRanksAreRefused) {
  class Early : public DDPStrategy {
   public:
    using DDPStrategy::DDPStrategy;
    Abilities abilities() const override {
      Abilities can = DDPStrategy::abilities();
      can.restores_after_setup = false;
      return can;
    }
  };
  for (const bool early : {false, true}) {
    const Folder folder;
    const auto fit = [&](const std::function<void(TrainerCheckpoints&, int rank)>& change) {
      return outcomes_on(3, [&](DistributedManager& manager) {
        std::shared_ptr<Strategy> strategy;
        if (early)
          strategy = std::make_shared<Early>(manager);
        else
          strategy = std::make_shared<DDPStrategy>(manager);
        Regression task;
        auto options = with(strategy, 1);
        options.checkpoint.folder = folder.path();
        change(options.checkpoint, manager.rank());
        Trainer(options).fit(task, ragged_batches(manager.rank(), 3));
      });
    };
    expect_all_told(fit([](TrainerCheckpoints& c, int rank) {
                      if (rank == 1) c.folder.clear();
                    }),
                    "ranks [0, 2] have \"checkpoint.folder some\", rank 1 has "
                    "\"checkpoint.folder none\"");
    expect_all_told(fit([](TrainerCheckpoints& c, int rank) { c.resume = rank == 2; }),
                    "have \"checkpoint.resume");
    expect_all_told(fit([](TrainerCheckpoints& c, int rank) {
                      if (rank == 0) c.from = "step-1";
                    }),
                    "ranks [0] have \"checkpoint.from step-1\"");
    expect_all_told(fit([](TrainerCheckpoints& c, int rank) { c.background = rank == 1; }),
                    "have \"checkpoint.background");
    EXPECT_TRUE(names_in(folder.path()).empty()) << "nothing was begun";
    for (const std::string& said : fit([](TrainerCheckpoints&, int) {}).said) EXPECT_EQ(said, "");
  }
}

// The unit of a step's loss follows from what the ranks add up. On one rank the optimizer's first
// parameter has a gradient that is a mean, on the others one that is a sum.
TEST(Hostile, RanksWhoseOptimizersBeginWithOtherParameters) {
  class Turned : public Mixed {
   public:
    using Mixed::Mixed;
    Optimizers optimizers() override {
      std::vector<at::Tensor> all = head->parameters();
      for (const at::Tensor& p : body->parameters()) all.push_back(p);
      return {std::make_shared<torch::optim::Adam>(all, torch::optim::AdamOptions(0.05))};
    }
  };
  const auto unclipped = [](std::shared_ptr<Strategy> strategy, int accumulate) {
    auto options = with(std::move(strategy), accumulate);
    options.session.clip = {};
    return options;
  };
  for (int ranks = 2; ranks <= 3; ++ranks) {
    for (const int accumulate : {1, 3}) {
      const auto expected = alone(ranks, 7, accumulate, unclipped(nullptr, 1));
      on_threads(ranks, [&](DistributedManager& manager) {
        std::unique_ptr<Mixed> task;
        if (manager.rank() == 0)
          task = std::make_unique<Turned>(manager);
        else
          task = std::make_unique<Mixed>(manager);
        DistributedDataParallel head(task->head, manager.world());
        Trainer(unclipped(std::make_shared<ManualStrategy>(manager), accumulate))
            .fit(*task, ragged_batches(manager.rank(), 7));
        expect_near(task->values(), expected, concat(ranks, " ranks, accumulate ", accumulate));
      });
    }
  }
}

}  // namespace tessera::test
