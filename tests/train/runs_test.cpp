// What runs leave for each other: checkpoints, learning rates, the state of callbacks; and what is
// told once. Logs: run_logs_test.cpp.

#include <c10/util/Exception.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "run_options.h"
#include "trouble.h"

namespace tessera::test {

using ::tessera::testing::put;

namespace {

std::vector<std::string> sorted_names(const std::string& folder) {
  auto names =
      Checkpointer(*SingleDevice().manager(), folder, {.remove_incomplete = false}).names();
  std::ranges::sort(names);
  return names;
}

// A task whose validation loss is given, and whose optimizer lives as long as it does.
class Keeps : public Regression {
 public:
  explicit Keeps(std::vector<double> losses = {1}) : losses_(std::move(losses)) {
    kept = std::make_shared<torch::optim::SGD>(net->parameters(), 0.1);
  }
  Optimizers optimizers() override { return {kept}; }
  std::vector<LearningRateSchedule> schedules() override {
    if (!halves) return {};
    return {{[](std::int64_t step, std::int64_t) { return std::pow(0.5, double(step)); }}};
  }
  void validation_step(const MicroBatch&, Step& step) override {
    step.log("loss", losses_[std::min(next_++, losses_.size() - 1)], 1.0);
  }
  double rate() const { return kept->param_groups()[0].options().get_lr(); }
  std::shared_ptr<torch::optim::SGD> kept;
  bool halves = false;

 private:
  std::vector<double> losses_;
  std::size_t next_ = 0;
};

struct Rates : Callback {
  std::string name() const override { return "rates"; }
  void on_before_step(Trainer& t, const StepResult&) override {
    rates.push_back(t.session().optimizers()[0]->param_groups()[0].options().get_lr());
  }
  std::vector<double> rates;
};

struct Ends : Callback {
  std::string name() const override { return "ends"; }
  void on_validation_end(Trainer&, bool) override { text += "validation "; }
  void on_epoch_end(Trainer&) override { text += "epoch "; }
  std::string text;
};

// What libtorch warns of on this thread.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : before_(c10::WarningUtils::get_warning_handler()) {
    c10::WarningUtils::set_warning_handler(this);
  }
  ~Warnings() override { c10::WarningUtils::set_warning_handler(before_); }
  void process(const c10::Warning& warning) override {
    if (warning.msg().starts_with("Trainer: ")) said.push_back(warning.msg());
  }
  std::vector<std::string> said;

 private:
  c10::WarningHandler* before_;
};

}  // namespace

// ---- checkpoints ----

TEST(Runs, WhatEvaluatesRemovesNothingFromTheFolder) {
  const Folder folder;
  auto options = plain(folder.path());
  options.callbacks = {keeping({})};
  Regression task;
  Trainer(options).fit(task, ragged_batches(0, 2));
  // As a save of another job looks before its manifest is there.
  std::filesystem::create_directories(folder / "step-9");
  put(folder / "step-9/rank-0.safetensors", "half");
  const auto listing = [&] {
    std::set<std::string> all;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      all.insert(entry.path().string());
    return all;
  };
  const auto before = listing();
  for (const bool resume : {false, true}) {
    auto other = plain(folder.path());
    other.checkpoint.resume = resume;
    Trainer(other).validate(task, ragged_batches(0, 1));
    Trainer(other).test(task, ragged_batches(0, 1));
    Trainer(other).predict(task, ragged_batches(0, 1));
    EXPECT_EQ(listing(), before);
  }
}

TEST(Runs, ADamagedCheckpointIsToldAndNoOtherTakesItsPlace) {
  for (const int ranks : {1, 2}) {
    for (const int kept : {1, 2}) {
      const Folder folder;
      const auto fit = [&](DistributedManager& manager, const std::string& from) {
        auto options = saving(std::make_shared<DDPStrategy>(manager), folder.path());
        options.checkpoint.from = from;
        options.callbacks = {keeping({.every_epochs = 1, .keep_last = kept})};
        Regression task;
        return Trainer(options).fit(task, ragged_batches(manager.rank(), 4)).steps;
      };
      on_threads(ranks, [&](DistributedManager& m) { EXPECT_EQ(fit(m, ""), 4); });
      const auto damage = [&folder](const std::string& name) {
        for (const auto& entry : std::filesystem::directory_iterator(folder / name))
          if (entry.path().extension() == ".safetensors")
            std::filesystem::resize_file(entry.path(), entry.file_size() / 2);
      };
      damage("step-4");
      const auto validate = [&](DistributedManager& manager) {
        Regression task;
        Trainer(saving(std::make_shared<DDPStrategy>(manager), folder.path()))
            .validate(task, ragged_batches(manager.rank(), 1));
      };
      for (const std::string what : {"step-4", "TrainerCheckpoints::from"}) {
        expect_all_told(outcomes_on(ranks, [&](DistributedManager& m) { fit(m, ""); }), what);
        expect_all_told(outcomes_on(ranks, validate), what);
      }
      if (kept < 2) continue;
      on_threads(ranks, [&](DistributedManager& m) { EXPECT_EQ(fit(m, "step-2"), 4); });
      // The latest is whole again; what is damaged before it stops nobody.
      damage("step-2");
      on_threads(ranks, validate);
    }
  }
}

TEST(Runs, CrashesDoNotPileUpCheckpoints) {
  struct Dies : Callback {
    explicit Dies(std::int64_t step) : at(step) {}
    std::string name() const override { return "dies"; }
    void on_batch_start(Trainer& t, const MicroBatch&) override {
      if (t.step() == at) throw Error("killed");
    }
    std::int64_t at;
  };
  for (const bool background : {false, true}) {
    const Folder folder;
    for (std::int64_t life = 1; life <= 6; ++life) {
      Regression task;
      auto options = plain(folder.path(), background);
      options.checkpoint.resume = true;
      options.checkpoint.background = background;
      options.callbacks = {keeping({.every_steps = 1, .at_end = false}),
                           std::make_shared<Dies>(3 * life)};
      EXPECT_THROW(Trainer(options).fit(task, ragged_batches(0, 40)), Error);
      // The last one, and the one before it that goes with the next save.
      EXPECT_LE(sorted_names(folder.path()).size(), 3u) << "life " << life;
    }
    Regression task;
    auto options = plain(folder.path(), background);
    options.checkpoint.resume = true;
    options.callbacks = {keeping({.every_steps = 1})};
    Trainer(options).fit(task, ragged_batches(0, 20));
    EXPECT_EQ(sorted_names(folder.path()), std::vector<std::string>{"step-20"});
  }
}

// The last one of a run that a signal ends is not among those that were asked for.
TEST(Runs, WhatASignalLeavesGoesWhenItsTurnComes) {
  struct Stops : Callback {
    explicit Stops(std::int64_t step) : at(step) {}
    std::string name() const override { return "stops"; }
    void on_step_end(Trainer& t, const StepResult&) override {
      if (t.step() == at) t.session().request_stop(Stop::terminated);
    }
    std::int64_t at;
  };
  for (const bool throws : {false, true}) {
    const Folder folder;
    for (std::int64_t life = 1; life <= 6; ++life) {
      Regression task;
      auto options = plain(folder.path());
      options.checkpoint.resume = true;
      options.callbacks = {keeping({.every_steps = 2, .at_end = false, .on_exception = throws}),
                           std::make_shared<Stops>(!throws && life < 6 ? 3 * life : -1),
                           std::make_shared<Grenade>("forward", 3 * life, throws && life < 6)};
      try {
        Trainer(options).fit(task, ragged_batches(0, 20));
        EXPECT_TRUE(!throws || life == 6);
      } catch (const Error& e) {
        EXPECT_TRUE(throws && life < 6) << e.what();
      }
      EXPECT_LE(sorted_names(folder.path()).size(), 3u) << "life " << life;
    }
    EXPECT_EQ(sorted_names(folder.path()), std::vector<std::string>{"step-20"});
  }
}

TEST(Runs, TheBestOfTwoValidationsAfterOneStepIsOneOfTheBest) {
  const Folder folder;
  Keeps task({5, 4, 6, 3, 7, 8});  // two a step
  auto options = plain(folder.path());
  options.max_epochs = 3;
  options.validate_every_steps = 1;
  const auto best = keeping({.monitor = "val/loss", .best = 2, .at_end = false});
  options.callbacks = {best};
  Trainer(options).fit(task, ragged_batches(0, 1), ragged_batches(0, 1));
  EXPECT_EQ(best->best(),
            (std::vector<std::pair<std::string, double>>{{"step-2", 3}, {"step-1", 4}}));
  EXPECT_EQ(sorted_names(folder.path()), (std::vector<std::string>{"step-1", "step-2"}));
  // Two that would remove each other's.
  options.checkpoint.options.keep_last = 2;
  EXPECT_THROW(Trainer(options).fit(task, ragged_batches(0, 1), ragged_batches(0, 1)),
               InvalidArgument);
}

// ---- what a run begins with ----

TEST(Runs, ASecondRunBeginsWithTheFirstLearningRate) {
  const Folder folder;
  Keeps task;
  task.halves = true;
  const auto run = [&](std::int64_t steps, bool resume) {
    auto options = plain(folder.path());
    options.max_steps = steps;
    options.checkpoint.resume = resume;
    const auto seen = std::make_shared<Rates>();
    options.callbacks = {seen, keeping({})};
    Trainer(options).fit(task, ragged_batches(0, 9));
    EXPECT_EQ(task.rate(), 0.1);
    return seen->rates;
  };
  EXPECT_EQ(run(2, false), (std::vector<double>{0.1, 0.05}));
  EXPECT_EQ(run(2, false), (std::vector<double>{0.1, 0.05}));
  EXPECT_EQ(run(4, true), (std::vector<double>{0.025, 0.0125})) << "resumed in the same process";
  // After an exception, too.
  auto options = plain();
  options.callbacks = {std::make_shared<Grenade>("after", 3, true)};
  EXPECT_THROW(Trainer(options).fit(task, ragged_batches(0, 9)), Error);
  EXPECT_EQ(task.rate(), 0.1);
}

TEST(Runs, AGroupOfParametersThatIsAddedMidwayIsScheduledAsTheOthers) {
  struct Adds : Callback {
    explicit Adds(Keeps& to) : task(to) {}
    std::string name() const override { return "adds"; }
    void on_step_end(Trainer& trainer, const StepResult&) override {
      if (trainer.step() != 2) return;
      task.kept->add_param_group({std::vector<at::Tensor>{extra}});
      task.kept->param_groups()[1].options().set_lr(0.4);
    }
    void on_before_step(Trainer&, const StepResult&) override {
      if (task.kept->param_groups().size() > 1)
        rates.push_back(task.kept->param_groups()[1].options().get_lr());
    }
    Keeps& task;
    at::Tensor extra = at::ones({}, at::kDouble).requires_grad_(true);
    std::vector<double> rates;
  };
  Keeps task;
  task.halves = true;
  auto options = plain();
  const auto adds = std::make_shared<Adds>(task);
  options.callbacks = {adds};
  Trainer(options).fit(task, ragged_batches(0, 4));
  EXPECT_EQ(adds->rates, (std::vector<double>{0.1, 0.05}));
  EXPECT_EQ(task.kept->param_groups()[1].options().get_lr(), 0.4);
}

TEST(Runs, CallbacksThatWaitBeginAnewAndNaNIsNeverTheBest) {
  auto options = plain();
  options.max_epochs = 4;
  options.callbacks = {
      std::make_shared<EarlyStopping>("val/loss", EarlyStoppingOptions{.patience = 1}),
      std::make_shared<ReduceOnPlateau>("val/loss", 0.5, EarlyStoppingOptions{.patience = 1})};
  Keeps task({4, 3, 2, 1, 8, 7, 6, 5});
  Trainer trainer(options);
  for (int run = 0; run < 2; ++run) {
    EXPECT_EQ(trainer.fit(task, ragged_batches(0, 1), ragged_batches(0, 1)).epochs, 4);
    EXPECT_EQ(task.rate(), 0.1);
  }
  Keeps nan({std::nan(""), 4, 3, 2, 2.5});
  const auto seen = std::make_shared<Rates>();
  options.max_epochs = 6;
  options.callbacks = {
      std::make_shared<ReduceOnPlateau>("val/loss", 0.5, EarlyStoppingOptions{.patience = 2}),
      seen};
  Trainer(options).fit(nan, ragged_batches(0, 1), ragged_batches(0, 1));
  EXPECT_EQ(seen->rates, (std::vector<double>(6, 0.1)));
}

TEST(Runs, TheLastStepOfARunThatIsTheLastOfAnEpochEndsIt) {
  const std::vector<MicroBatch> listed{make_batch(ragged_data(0, 0)), make_batch(ragged_data(0, 1)),
                                       make_batch(ragged_data(0, 2))};
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      for (const bool known : {false, true}) {
        for (const std::int64_t steps : {2, 3, 6}) {
          Regression task;
          auto options = with(std::make_shared<DDPStrategy>(manager), 1);
          options.max_epochs = 5;
          options.max_steps = steps;
          const auto ends = std::make_shared<Ends>();
          options.callbacks = {ends};
          const FitResult result = Trainer(options).fit(
              task, known ? batches_of(listed) : ragged_batches(manager.rank(), 3),
              ragged_batches(manager.rank(), 1));
          EXPECT_EQ(result.steps, steps);
          EXPECT_EQ(result.epochs, steps / 3);
          std::string expected;
          for (std::int64_t e = 0; e < steps / 3; ++e) expected += "validation epoch ";
          EXPECT_EQ(ends->text, expected) << steps << " steps, known length: " << known;
        }
      }
    });
  }
}

// ---- what is told once ----

TEST(Runs, ALossOrMetricThatIsNaNIsToldInOneLineWithStepAndRank) {
  struct Breaks : Regression {
    Breaks(bool mine, bool metric) : mine(mine), metric(metric) {}
    at::Tensor training_step(const MicroBatch& batch, Step& step) override {
      at::Tensor loss = Regression::training_step(batch, step);
      if (!mine || step.step() != 2) return loss;  // a batch in which rank 1 has rows
      if (metric) step.log("odd", std::nan(""), 1.0);
      return metric ? loss : loss * std::nan("");
    }
    bool mine, metric;
  };
  for (const bool metric : {false, true}) {
    on_threads(2, [&](DistributedManager& manager) {
      Warnings heard;
      Breaks task(manager.rank() == 1, metric);
      auto options = plain();
      options.strategy = std::make_shared<DDPStrategy>(manager);
      Trainer(options).fit(task, ragged_batches(manager.rank(), 6));
      ASSERT_EQ(heard.said.size(), manager.rank() == 0 ? 1u : 0u);
      if (manager.rank() != 0) return;
      EXPECT_NE(heard.said[0].find("step 3"), std::string::npos) << heard.said[0];
      EXPECT_NE(heard.said[0].find("nan, by ranks [1]"), std::string::npos) << heard.said[0];
      EXPECT_EQ(heard.said[0].find("odd") != std::string::npos, metric) << heard.said[0];
    });
  }
}

// What tensors a callback has that the checkpoint knows nothing of, is said by its name.
TEST(Runs, ACallbackThatIsNewInARunThatGoesOnIsNamed) {
  const Folder folder;
  Regression task;
  auto options = plain(folder.path());
  options.callbacks = {keeping({})};
  Trainer(options).fit(task, ragged_batches(0, 2));
  options.checkpoint.resume = true;
  options.max_epochs = 2;
  options.callbacks.push_back(std::make_shared<Ema>(0.5));
  try {
    Trainer(options).fit(task, ragged_batches(0, 2));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("callback 'ema' is new"), std::string::npos) << e.what();
  }
}

}  // namespace tessera::test
