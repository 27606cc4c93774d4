// What each callback promises.

#include <cmath>
#include <limits>

#include "support.h"

namespace tessera::test {

namespace {

// A task whose validation loss is given.
class Scripted : public Regression {
 public:
  explicit Scripted(std::vector<double> losses) : losses_(std::move(losses)) {}
  void validation_step(const MicroBatch&, Step& step) override {
    step.log("loss", losses_[std::min(next_++, losses_.size() - 1)], 1.0);
  }

 private:
  std::vector<double> losses_;
  std::size_t next_ = 0;
};

TrainerOptions validating(DistributedManager& manager, std::int64_t epochs) {
  TrainerOptions options;
  options.strategy = std::make_shared<DDPStrategy>(manager);
  options.session.signals = false;
  options.max_epochs = epochs;
  return options;
}

std::vector<std::string> checkpoints_in(DistributedManager& manager, const std::string& folder) {
  return Checkpointer(manager, folder).names();
}

}  // namespace

TEST(Callbacks, EarlyStoppingStopsAllRanks) {
  on_threads(2, [](DistributedManager& manager) {
    const auto run = [&](std::vector<double> losses, EarlyStoppingOptions stopping) {
      Scripted task(std::move(losses));
      auto options = validating(manager, 9);
      options.callbacks = {std::make_shared<EarlyStopping>("val/loss", stopping)};
      return Trainer(options).fit(task, ragged_batches(manager.rank(), 2),
                                  ragged_batches(manager.rank(), 1));
    };
    FitResult result = run({5, 4, 4.5, 3, 3.5, 3.5, 1}, {.patience = 2});
    EXPECT_EQ(result.epochs, 6);
    EXPECT_EQ(result.stop, Stop::requested);
    EXPECT_NE(result.reason.find("has not improved on 3"), std::string::npos) << result.reason;
    EXPECT_EQ(run({5, 4.9, 4.8}, {.patience = 1, .least = 0.5}).epochs, 2);
    EXPECT_EQ(run({1, 2, 3, 2.5}, {.patience = 1, .better = Better::larger}).epochs, 4);
    result = run({5, std::nan(""), 1}, {});
    EXPECT_EQ(result.epochs, 2);
    EXPECT_NE(result.reason.find("is nan"), std::string::npos) << result.reason;
    EXPECT_EQ(run({9, 8, 7, 6, 5, 4, 3, 2, 1}, {}).stop, Stop::none);
    EXPECT_THROW(EarlyStopping("x", {.patience = 0}), InvalidArgument);
  });
  EXPECT_THROW(
      {
        Scripted task({1});
        TrainerOptions options;
        options.callbacks = {std::make_shared<EarlyStopping>("val/other")};
        Trainer(options).fit(task, ragged_batches(0, 1), ragged_batches(0, 1));
      },
      InvalidArgument);
}

TEST(Callbacks, CheckpointsKeepTheBestAndTheLast) {
  for (const bool background : {false, true}) {
    const Folder folder;
    on_threads(2, [&](DistributedManager& manager) {
      Scripted task({5, 3, 4, 6, 2, 9});
      auto options = validating(manager, 6);  // two steps each
      options.checkpoint.folder = folder.path();
      options.checkpoint.background = background;
      const auto best = std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
          .every_epochs = 2, .keep_last = 1, .monitor = "val/loss", .best = 2, .at_end = false});
      options.callbacks = {best};
      Trainer(options).fit(task, ragged_batches(manager.rank(), 2),
                           ragged_batches(manager.rank(), 1));
      EXPECT_EQ(best->best(),
                (std::vector<std::pair<std::string, double>>{{"step-10", 2}, {"step-4", 3}}));
      auto names = checkpoints_in(manager, folder.path());
      std::ranges::sort(names);
      EXPECT_EQ(names, (std::vector<std::string>{"step-10", "step-12", "step-4"}));
    });
  }
  EXPECT_THROW(CheckpointCallback({.best = 0}), InvalidArgument);
  EXPECT_THROW(
      {
        Regression task;
        TrainerOptions options;
        options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
        Trainer(options).fit(task, ragged_batches(0, 1));
      },
      InvalidArgument);
}

TEST(Callbacks, CheckpointsByStepsAndByTheClock) {
  const Folder folder, timed;
  on_threads(2, [&](DistributedManager& manager) {
    Regression task;
    auto options = validating(manager, 1);
    options.checkpoint.folder = folder.path();
    options.callbacks = {std::make_shared<CheckpointCallback>(
        CheckpointCallbackOptions{.every_steps = 3, .keep_last = 0, .at_end = true})};
    const FitResult result = Trainer(options).fit(task, ragged_batches(manager.rank(), 7));
    EXPECT_EQ(result.checkpoint, "step-7");
    auto names = checkpoints_in(manager, folder.path());
    std::ranges::sort(names);
    EXPECT_EQ(names, (std::vector<std::string>{"step-3", "step-6", "step-7"}));

    // One rank's clock says so: both save, at the same step.
    Regression other;
    auto by_clock = validating(manager, 1);
    by_clock.checkpoint.folder = timed.path();
    by_clock.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
        .every = manager.rank() == 1 ? std::chrono::milliseconds(1) : std::chrono::hours(1),
        .keep_last = 0,
        .at_end = false})};
    const auto slow = batches_of([&](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
      if (i >= 4) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      return make_batch(ragged_data(manager.rank(), static_cast<std::int64_t>(i)));
    });
    Trainer(by_clock).fit(other, slow);
    EXPECT_GE(checkpoints_in(manager, timed.path()).size(), 1u);
  });
}

// By its number, the end of its epoch, the end of the run, or a signal (which is learnt of at the
// next step, or before a validation): one checkpoint.
TEST(Callbacks, TheLastStepIsSavedOnce) {
  struct Signalled : Callback {
    std::string name() const override { return "signalled"; }
    void on_step_end(Trainer& t, const StepResult&) override {
      if (at > 0 && t.step() == at - 1) t.session().request_stop(Stop::usr1);
    }
    std::int64_t at = 0;
  };
  struct Case {
    CheckpointCallbackOptions options;
    int signal;
    std::vector<int> saved;
  };
  const std::vector<Case> cases = {{{.every_steps = 2}, 0, {2, 4}},
                                   {{.every_epochs = 1}, 0, {2, 4}},
                                   {{.every_steps = 3}, 0, {3, 4}},
                                   {{.monitor = "val/loss"}, 0, {2, 4}},
                                   {{}, 0, {4}},
                                   {{.every_steps = 3}, 4, {3, 4}},
                                   {{.every_steps = 2}, 4, {2, 4}},
                                   {{.every_steps = 2}, 3, {2}},
                                   {{}, 2, {2}},
                                   {{}, 3, {2}}};
  for (const bool background : {false, true})
    for (const Case& one : cases) {
      const Folder folder;
      on_threads(2, [&](DistributedManager& manager) {
        Scripted task({5, 3});
        std::ostringstream out;
        auto options = validating(manager, 2);  // two steps each
        options.checkpoint.folder = folder.path();
        options.checkpoint.background = background;
        const auto signalled = std::make_shared<Signalled>();
        signalled->at = one.signal;
        options.callbacks = {signalled, std::make_shared<CheckpointCallback>(one.options)};
        options.progress.out = &out;
        const auto batches = ragged_batches(manager.rank(), 2);
        const FitResult result =
            Trainer(options).fit(task, batches, ragged_batches(manager.rank(), 1));
        EXPECT_EQ(result.checkpoint, concat("step-", one.saved.back()));
        if (manager.rank() != 0) return;
        std::vector<int> saved;
        const std::string said = out.str();
        constexpr std::string_view kSaved = "saved step-";
        for (auto at = said.find(kSaved); at != std::string::npos; at = said.find(kSaved, at + 1))
          saved.push_back(std::stoi(said.substr(at + kSaved.size())));
        EXPECT_EQ(saved, one.saved) << said;
      });
    }
}

// Half, then twice: as before, also for a run that goes on from a checkpoint.
TEST(Callbacks, ALearningRateThatIsScaledBackIsTheFirstAgain) {
  struct Scales : Callback {
    std::string name() const override { return "scales"; }
    void on_step_end(Trainer& t, const StepResult&) override {
      if (t.step() == 2) t.scale_learning_rate(0.5);
      if (t.step() == 4) t.scale_learning_rate(2);
    }
    void on_before_step(Trainer& t, const StepResult&) override {
      rates.push_back(t.session().optimizers()[0]->param_groups()[0].options().get_lr());
    }
    std::vector<double> rates;
  };
  on_threads(1, [](DistributedManager& manager) {
    const Folder folder;
    const auto run = [&](int steps) {
      Regression task;
      auto options = validating(manager, 1);
      options.max_epochs = 1;
      options.max_steps = steps;
      options.checkpoint.folder = folder.path();
      options.checkpoint.resume = true;
      const auto scales = std::make_shared<Scales>();
      options.callbacks = {scales, std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
                                       .every_steps = 4, .at_end = false})};
      Trainer(options).fit(task, ragged_batches(0, 7));
      return scales->rates;
    };
    const double full = 0.05;
    EXPECT_EQ(run(5), (std::vector<double>{full, full, full / 2, full / 2, full}));
    EXPECT_EQ(run(7), (std::vector<double>{full, full, full}));
  });
}

TEST(Callbacks, ReduceOnPlateauAndTheMonitor) {
  on_threads(2, [](DistributedManager& manager) {
    Scripted task({5, 6, 6, 4, 4});
    auto options = validating(manager, 5);
    options.log_every_steps = 1;
    struct Seen : Callback {
      std::string name() const override { return "seen"; }
      void on_log(Trainer&, const std::map<std::string, double>& values) override {
        if (values.contains("lr/0")) rates.push_back(values.at("lr/0"));
      }
      std::vector<double> rates;
    };
    const auto seen = std::make_shared<Seen>();
    options.callbacks = {
        std::make_shared<ReduceOnPlateau>("val/loss", 0.5, EarlyStoppingOptions{.patience = 2}),
        std::make_shared<LearningRateMonitor>(), seen};
    Trainer(options).fit(task, ragged_batches(manager.rank(), 1), ragged_batches(0, 1));
    EXPECT_EQ(seen->rates, (std::vector<double>{0.05, 0.05, 0.05, 0.025, 0.025}));
  });
}

TEST(Callbacks, EmaFollowsItsDefinitionAndValidationsUseIt) {
  for (const bool sharded : {false, true}) {
    on_threads(3, [&](DistributedManager& manager) {
      struct Definition : Callback {
        std::string name() const override { return "definition"; }
        void on_fit_start(Trainer& trainer) override {
          for (const auto& p : trainer.session().modules()[0].module->parameters())
            average.push_back(whole(p).clone());
        }
        void on_step_end(Trainer& trainer, const StepResult&) override {
          const auto now = trainer.session().modules()[0].module->parameters();
          for (std::size_t i = 0; i < now.size(); ++i)
            average[i] = 0.7 * average[i] + 0.3 * whole(now[i]);
        }
        void on_validation_start(Trainer& trainer) override {
          const auto now = trainer.session().modules()[0].module->parameters();
          for (std::size_t i = 0; i < now.size(); ++i)
            EXPECT_LT(difference(whole(now[i]), average[i]), 1e-12);
        }
        std::vector<at::Tensor> average;
      };
      Regression task;
      auto options = validating(manager, 2);
      if (sharded)
        options.strategy = std::make_shared<MeshStrategy>(
            manager.mesh({{"data", 3}}), NamedPlacements{{"*.weight", {{Shard(0)}}}},
            std::vector{Shard(0)});
      const auto ema = std::make_shared<Ema>(0.7);
      const auto definition = std::make_shared<Definition>();
      options.callbacks = {ema, definition};
      Trainer(options).fit(task, ragged_batches(manager.rank(), 4),
                           ragged_batches(manager.rank(), 2));
      // The parameters came back.
      const auto now = task.values();
      bool moved = false;
      for (std::size_t i = 0; i < now.size(); ++i)
        moved = moved || difference(now[i], definition->average[i]) > 1e-6;
      EXPECT_TRUE(moved);
      for (const auto& [name, average] : ema->average())
        EXPECT_EQ(is_sharded(average), sharded) << name;
    });
  }
  EXPECT_THROW(Ema(1.0), InvalidArgument);
}

// A tied weight has several names, and is one parameter.
TEST(Callbacks, ATiedWeightComesBackFromTheValidationsOfAnEma) {
  struct Tied : Regression {
    using Regression::Regression;
    Optimizers optimizers() override {
      std::vector<at::Tensor> once = net->parameters();
      once.erase(once.begin() + 2, once.begin() + 4);
      return {std::make_shared<torch::optim::SGD>(once, torch::optim::SGDOptions(0.1))};
    }
  };
  on_threads(2, [](DistributedManager& manager) {
    const auto trained = [&](std::vector<std::shared_ptr<Callback>> callbacks) {
      torch::nn::Linear twice(3, 3), last(3, 2);
      torch::nn::Sequential net(twice, twice, last);
      net->to(at::kDouble);
      fill(*net, 7);
      Tied task(net);
      auto options = validating(manager, 2);
      options.callbacks = std::move(callbacks);
      Trainer(options).fit(task, ragged_batches(manager.rank(), 4),
                           ragged_batches(manager.rank(), 2));
      return task.values();
    };
    const auto ema = std::make_shared<Ema>(0.7);
    expect_equal(trained({ema}), trained({}), "beside an average");
    EXPECT_EQ(ema->average().size(), 4U);
  });
}

TEST(Callbacks, TheTimerOfOneRankStopsAll) {
  on_threads(2, [](DistributedManager& manager) {
    Regression task;
    auto options = validating(manager, 1);
    options.max_steps = 100000;
    const auto limit = manager.rank() == 1 ? std::chrono::milliseconds(60) : std::chrono::hours(1);
    options.callbacks = {std::make_shared<Timer>(limit)};
    const auto endless =
        batches_of([&](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
          return make_batch(ragged_data(manager.rank(), static_cast<std::int64_t>(i % 7)));
        });
    const FitResult result = Trainer(options).fit(task, endless);
    EXPECT_EQ(result.stop, Stop::requested);
    EXPECT_LT(result.steps, 100000);
  });
}

TEST(Callbacks, ATimerOfADamagedCheckpointStillEndsTheRun) {
  on_threads(1, [](DistributedManager& manager) {
    struct Loads : Callback {
      std::string name() const override { return "loads"; }
      void on_step_end(Trainer& trainer, const StepResult&) override {
        Timer timer(std::chrono::hours(1));
        CheckpointState state;
        state.set_of_rank("t/elapsed", integer_bytes(std::numeric_limits<std::int64_t>::max()));
        timer.loaded(trainer, state, "t/");
        timer.on_fit_start(trainer);
        EXPECT_GE(timer.elapsed(), std::chrono::hours(1));
        state.set_of_rank("t/elapsed", integer_bytes(-1));
        EXPECT_THROW(timer.loaded(trainer, state, "t/"), InvalidArgument);
        ++steps;
      }
      int steps = 0;
    };
    const auto loads = std::make_shared<Loads>();
    Regression task;
    auto options = validating(manager, 1);
    options.max_steps = 1;
    options.callbacks = {loads};
    const auto one = batches_of([&](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
      return make_batch(ragged_data(0, static_cast<std::int64_t>(i % 7)));
    });
    Trainer(options).fit(task, one);
    EXPECT_EQ(loads->steps, 1);
  });
}

// Of equal values the earlier checkpoints stay; NaN is never among the best; a checkpoint that is
// both the last and one of the best goes when it is neither.
TEST(Callbacks, TiesKeepTheEarlierCheckpoint) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Scripted task({3, 3, 3, std::nan(""), 2, 2});
    auto options = validating(manager, 6);
    options.checkpoint.folder = folder.path();
    const auto best = std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
        .every_epochs = 1, .keep_last = 1, .monitor = "val/loss", .best = 2, .at_end = false});
    options.callbacks = {best};
    Trainer(options).fit(task, ragged_batches(manager.rank(), 1), ragged_batches(0, 1));
    EXPECT_EQ(best->best(),
              (std::vector<std::pair<std::string, double>>{{"step-5", 2}, {"step-6", 2}}));
    auto names = checkpoints_in(manager, folder.path());
    std::ranges::sort(names);
    EXPECT_EQ(names, (std::vector<std::string>{"step-5", "step-6"}));
  });
  const Folder larger;
  on_threads(1, [&](DistributedManager& manager) {
    Scripted task({1, 1, 1});
    auto options = validating(manager, 3);
    options.checkpoint.folder = larger.path();
    const auto best = std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
        .monitor = "val/loss", .better = Better::larger, .at_end = false});
    options.callbacks = {best};
    Trainer(options).fit(task, ragged_batches(0, 1), ragged_batches(0, 1));
    EXPECT_EQ(checkpoints_in(manager, larger.path()), std::vector<std::string>{"step-1"});
  });
}

}  // namespace tessera::test
