// Exceptions and full disks in the middle of a run, on one rank: all ranks are told the same, and
// the next run goes on from what stands.

#include <future>
#include <thread>

#include "trouble.h"

namespace tessera::test {

TEST(OnException, TheLastWholeStateIsSavedAndTheRunGoesOn) {
  for (const int ranks : {1, 3}) {
    std::vector<std::vector<at::Tensor>> expected(static_cast<std::size_t>(ranks));
    const auto run = [&](DistributedManager& manager, const std::string& folder,
                         const std::string& where) {
      auto options = saving(std::make_shared<DDPStrategy>(manager), folder);
      options.callbacks = {std::make_shared<CheckpointCallback>(
          CheckpointCallbackOptions{.at_end = false, .on_exception = true})};
      // An epoch has three steps.
      return run_with(manager, options, where, where == "validation" || where == "epoch" ? 3 : 4);
    };
    const Folder none;
    on_threads(ranks,
               [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", ""); });
    for (const std::string where :
         {"forward", "backward", "before", "validation", "epoch", "after", "save"}) {
      const Folder folder;
      expect_all_told(
          outcomes_on(ranks, [&](DistributedManager& m) { run(m, folder.path(), where); }),
          "a grenade in " + where);
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto names = Checkpointer(manager, folder.path()).names();
        const bool third = where == "validation" || where == "epoch";
        // The other ranks have begun the step in front of which one of them threw, or the state of
        // that step could not be taken: nothing is whole, and the run begins anew.
        if (where == "save" || (where == "before" && ranks > 1))
          EXPECT_EQ(names, std::vector<std::string>{});
        else
          EXPECT_EQ(names, std::vector<std::string>{third ? "step-3" : "step-4"}) << where;
        expect_equal(run(manager, folder.path(), ""), expected[manager.rank()], where);
      });
    }
  }
}

// It waits for none of the others, which save nothing.
TEST(OnException, AFirstRankThatSavesAloneSavesTheLastWholeState) {
  class Alone : public DDPStrategy {
   public:
    using DDPStrategy::DDPStrategy;
    Abilities abilities() const override {
      Abilities can = DDPStrategy::abilities();
      can.saves_on_all_ranks = false;
      return can;
    }
  };
  const Folder folder;
  std::promise<void> saved;
  const std::shared_future<void> is_saved = saved.get_future().share();
  const Outcomes all = outcomes_on(2, [&](DistributedManager& manager) {
    auto options = saving(std::make_shared<Alone>(manager), folder.path());
    options.callbacks = {std::make_shared<CheckpointCallback>(
                             CheckpointCallbackOptions{.at_end = false, .on_exception = true}),
                         std::make_shared<Grenade>("backward", 4, manager.rank() == 0)};
    Regression task;
    try {
      Trainer(options).fit(task, ragged_batches(manager.rank(), 5));
    } catch (...) {
      // A rank that ends before would end what the first one does.
      if (manager.rank() == 0)
        saved.set_value();
      else
        is_saved.wait_for(std::chrono::seconds(90));
      throw;
    }
  });
  expect_all_told(all, "a grenade in backward");
  on_threads(1, [&](DistributedManager& manager) {
    EXPECT_EQ(Checkpointer(manager, folder.path()).latest(), "step-4");
  });
}

// The same modules and trainer: what the run that failed had accumulated is not in the next step.
TEST(OnException, TheNextRunBeginsWithoutTheGradientsOfTheOneThatFailed) {
  struct FailsOnce : Regression {
    at::Tensor training_step(const MicroBatch& batch, Step& step) override {
      if (++calls == 2) throw Error("the second micro-batch");
      return Regression::training_step(batch, step);
    }
    int calls = 0;
  };
  on_threads(1, [&](DistributedManager& manager) {
    TrainerOptions options;
    options.strategy = std::make_shared<DDPStrategy>(manager);
    options.session.signals = false;
    options.max_epochs = 1;
    options.accumulate = 2;
    options.session.clip.max_norm = 0.1;
    FailsOnce task;
    Trainer trainer(options);
    EXPECT_THROW(trainer.fit(task, ragged_batches(0, 4)), Error);
    trainer.fit(task, ragged_batches(0, 4));
    Regression fresh;
    Trainer(options).fit(fresh, ragged_batches(0, 4));
    expect_equal(task.values(), fresh.values(), "after a failure");
  });
}

TEST(Hostile, ThrowingInSaveOrLoadOnOneRankIsToldAndTheCheckpointBeforeStays) {
  const Folder folder, none;
  std::vector<std::vector<at::Tensor>> expected(2);
  const auto run = [&](DistributedManager& manager, const std::string& path,
                       const std::string& where, std::int64_t step) {
    auto options = saving(std::make_shared<DDPStrategy>(manager), path);
    options.callbacks = {std::make_shared<CheckpointCallback>(
        CheckpointCallbackOptions{.every_steps = 1, .keep_last = 2})};
    return run_with(manager, options, where, step);
  };
  on_threads(2, [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", "", 0); });
  // While the save of the step before may still be in flight.
  expect_all_told(outcomes_on(2, [&](DistributedManager& m) { run(m, folder.path(), "save", 4); }),
                  "a grenade in save");
  std::int64_t at = 0;
  on_threads(1, [&](DistributedManager& manager) {
    const auto latest = Checkpointer(manager, folder.path()).latest();
    ASSERT_TRUE(latest);
    at = std::stoll(latest->substr(5));
  });
  EXPECT_GE(at, 2);
  expect_all_told(outcomes_on(2, [&](DistributedManager& m) { run(m, folder.path(), "load", at); }),
                  "a grenade in load");
  on_threads(2, [&](DistributedManager& m) {
    expect_equal(run(m, folder.path(), "", 0), expected[m.rank()], "gone on");
  });
}

// With a save of every step in the background: whichever of them stands, the run goes on from it.
TEST(Hostile, InterruptedAnywhereWithSavesInFlight) {
  std::vector<std::vector<at::Tensor>> expected(2);
  const auto run = [&](DistributedManager& manager, const std::string& folder,
                       const std::string& where, std::int64_t step) {
    auto options = saving(std::make_shared<DDPStrategy>(manager), folder);
    options.checkpoint.options.background_rate = 400'000;  // slower than a step
    options.callbacks = {std::make_shared<CheckpointCallback>(
        CheckpointCallbackOptions{.every_steps = 1, .at_end = false})};
    return run_with(manager, options, where, step);
  };
  const Folder none;
  on_threads(2, [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", "", 0); });
  for (std::int64_t step = 1; step <= 5; ++step) {
    for (const std::string where : {"forward", "after"}) {
      const Folder folder;
      expect_all_told(
          outcomes_on(2, [&](DistributedManager& m) { run(m, folder.path(), where, step); }),
          "a grenade in " + where);
      on_threads(2, [&](DistributedManager& m) {
        // Never more is lost than what was saved by the save before the one in flight.
        const auto latest = Checkpointer(m, folder.path()).latest();
        const std::int64_t saved = where == "forward" ? step : step - 1;
        EXPECT_GE(latest ? std::stoll(latest->substr(5)) : 0, saved - 1) << where << step;
        expect_equal(run(m, folder.path(), "", 0), expected[m.rank()], concat(where, " ", step));
      });
    }
  }
}

TEST(Hostile, AFullDiskInTheBackgroundIsTheNextCallsErrorAndNothingIsLost) {
  class FullFrom : public FileOperations {
   public:
    explicit FullFrom(std::string name) : name_(std::move(name)) {}
    void sync(const File& file) override {
      if (file.path.find(name_) != std::string::npos)
        throw FileError("'", file.path, "': No space left on device");
      FileOperations::sync(file);
    }

   private:
    std::string name_;
  };
  const Folder folder, none;
  std::vector<std::vector<at::Tensor>> expected(2);
  const auto run = [&](DistributedManager& manager, const std::string& path, bool full) {
    auto options = saving(std::make_shared<DDPStrategy>(manager), path);
    if (full && manager.rank() == 1)
      options.checkpoint.options.operations = std::make_shared<FullFrom>("/step-3/");
    options.callbacks = {
        std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{.every_steps = 1})};
    return run_with(manager, options, "", 0);
  };
  on_threads(2, [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", false); });
  expect_all_told(outcomes_on(2, [&](DistributedManager& m) { run(m, folder.path(), true); }),
                  "No space left on device");
  on_threads(2, [&](DistributedManager& m) {
    EXPECT_EQ(Checkpointer(m, folder.path()).latest(), "step-2");
    expect_equal(run(m, folder.path(), false), expected[m.rank()], "gone on");
  });
}

TEST(Hostile, AReductionThatThrowsOnOneRankEndsAll) {
  class Breaks : public DDPStrategy {
   public:
    using DDPStrategy::DDPStrategy;
    void reduce(const at::Tensor& t, ReduceOp op, const std::optional<Group>& group) override {
      if (rank() == 1 && ++calls_ == 3) throw Error("the wire is cut");
      DDPStrategy::reduce(t, op, group);
    }

   private:
    int calls_ = 0;
  };
  expect_all_told(outcomes_on(3,
                              [](DistributedManager& manager) {
                                Regression task;
                                Trainer(with(std::make_shared<Breaks>(manager), 1))
                                    .fit(task, ragged_batches(manager.rank(), 5));
                              }),
                  "the wire is cut");
}

// The best checkpoint is in flight when the exception comes: what is saved after it counts on it.
TEST(OnException, ACheckpointThatIsInFlightIsOnTheDiskBeforeTheWholeStateOrThatIsNotSaved) {
  enum class Disk { slow, full };
  class Operations : public FileOperations {
   public:
    explicit Operations(Disk disk) : disk_(disk) {}
    void sync(const File& file) override {
      if (file.path.find("/step-1/") != std::string::npos) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (disk_ == Disk::full) throw FileError("'", file.path, "': No space left on device");
      }
      FileOperations::sync(file);
    }

   private:
    Disk disk_;
  };
  struct Worsens : Regression {
    void validation_step(const MicroBatch&, Step& step) override { step.log("loss", ++seen, 1.0); }
    double seen = 0;
  };
  const std::vector<std::string> none, both{"step-1", "step-2"};
  for (const Disk disk : {Disk::slow, Disk::full})
    for (const int who : {0, 1}) {
      const Folder folder;
      expect_all_told(
          outcomes_on(2,
                      [&](DistributedManager& manager) {
                        auto options =
                            saving(std::make_shared<DDPStrategy>(manager), folder.path());
                        options.validate_every_steps = 1;
                        options.checkpoint.options.operations = std::make_shared<Operations>(disk);
                        options.callbacks = {
                            std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
                                .monitor = "val/loss", .at_end = false, .on_exception = true}),
                            std::make_shared<Grenade>("after", 2, manager.rank() == who)};
                        Worsens task;
                        Trainer(options).fit(task, ragged_batches(manager.rank(), 5),
                                             ragged_batches(manager.rank(), 2));
                      }),
          "a grenade in after");
      const SingleDevice one;
      EXPECT_EQ(Checkpointer(*one.manager(), folder.path()).names(),
                disk == Disk::slow ? both : none);
    }
}

// What a callback gives to a checkpoint is that of the last whole state, though the callback has
// gone on writing to the same memory since.
TEST(OnException, WhatCallbacksSaveIsCopied) {
  class Counting : public Callback {
   public:
    std::string name() const override { return "counting"; }
    void on_batch_start(Trainer&, const MicroBatch&) override { batches.add_(1); }
    void save(Trainer&, CheckpointState& state, const std::string& prefix) override {
      state.add(prefix + "batches", batches);
    }
    at::Tensor batches = at::zeros({2}, at::kDouble);
  };
  for (const int ranks : {1, 2}) {
    const Folder folder;
    const auto run = [&](DistributedManager& manager, const std::string& where) {
      auto options = saving(std::make_shared<DDPStrategy>(manager), folder.path());
      const auto counting = std::make_shared<Counting>();
      options.callbacks = {counting, std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{
                                         .at_end = false, .on_exception = true})};
      run_with(manager, options, where, 4);
      return counting->batches;
    };
    expect_all_told(outcomes_on(ranks, [&](DistributedManager& m) { run(m, "backward"); }),
                    "a grenade in backward");
    on_threads(ranks, [&](DistributedManager& manager) {
      EXPECT_EQ(Checkpointer(manager, folder.path()).latest(), "step-4");
      EXPECT_TRUE(run(manager, "").equal(at::full({2}, 10, at::kDouble)))
          << "each of the ten micro-batches once";
    });
  }
}

// Told, saved and gone on from as any other.
TEST(OnException, WhatIsThrownNeedsNotBeAStdException) {
  class Throws : public Callback {
   public:
    Throws(std::int64_t step, bool armed) : step_(step), armed_(armed) {}
    std::string name() const override { return "throws"; }
    void on_batch_start(Trainer& trainer, const MicroBatch&) override {
      if (armed_ && trainer.step() == step_) throw 7;  // NOLINT: on purpose
    }
    void on_exception(Trainer&, const std::exception& e) override { heard = e.what(); }
    std::string heard;

   private:
    std::int64_t step_;
    bool armed_;
  };
  for (const int ranks : {1, 3}) {
    std::vector<std::vector<at::Tensor>> expected(static_cast<std::size_t>(ranks));
    std::vector<std::string> heard(static_cast<std::size_t>(ranks));
    const auto run = [&](DistributedManager& manager, const std::string& folder, bool armed) {
      auto options = saving(std::make_shared<DDPStrategy>(manager), folder);
      const bool mine = armed && manager.rank() == manager.world_size() - 1;
      const auto throws = std::make_shared<Throws>(4, mine);
      options.callbacks = {std::make_shared<CheckpointCallback>(
                               CheckpointCallbackOptions{.at_end = false, .on_exception = true}),
                           throws};
      try {
        return run_with(manager, options, "", 0);
      } catch (...) {
        heard[static_cast<std::size_t>(manager.rank())] = throws->heard;
        throw;
      }
    };
    const Folder none, folder;
    on_threads(ranks,
               [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", false); });
    expect_all_told(outcomes_on(ranks, [&](DistributedManager& m) { run(m, folder.path(), true); }),
                    "no std::exception");
    for (const std::string& what : heard)
      EXPECT_NE(what.find("no std::exception"), std::string::npos) << what;
    on_threads(ranks, [&](DistributedManager& manager) {
      EXPECT_EQ(Checkpointer(manager, folder.path()).latest(), "step-4");
      expect_equal(run(manager, folder.path(), false), expected[manager.rank()], "gone on");
    });
  }
}

// The same out of a validation, a test and a prediction.
TEST(OnException, EvaluationsReportWhateverIsThrown) {
  class Throws : public Regression {
   public:
    explicit Throws(bool armed) : armed_(armed) {}
    void validation_step(const MicroBatch& batch, Step& step) override {
      if (armed_) throw 7;  // NOLINT: on purpose
      Regression::validation_step(batch, step);
    }
    std::vector<at::Tensor> predict_step(const MicroBatch& batch, Step& step) override {
      if (armed_) throw 7;  // NOLINT: on purpose
      return Regression::predict_step(batch, step);
    }

   private:
    bool armed_;
  };
  struct Heard : Callback {
    std::string name() const override { return "heard"; }
    void on_exception(Trainer&, const std::exception& e) override { what = e.what(); }
    std::string what;
  };
  for (const std::string stage : {"validate", "test", "predict"}) {
    std::vector<std::string> heard(2);
    const auto evaluate = [&](DistributedManager& manager) {
      Throws task(manager.rank() == 1);
      const auto callback = std::make_shared<Heard>();
      auto options = with(std::make_shared<DDPStrategy>(manager), 1);
      options.callbacks = {callback};
      Trainer trainer(options);
      const auto source = ragged_batches(manager.rank(), 2);
      try {
        if (stage == "validate")
          trainer.validate(task, source);
        else if (stage == "test")
          trainer.test(task, source);
        else
          trainer.predict(task, source);
        // The others hear of it at their next call.
        manager.world().barrier();
      } catch (...) {
        heard[static_cast<std::size_t>(manager.rank())] = callback->what;
        if (manager.rank() == 1) {
          EXPECT_THROW(trainer.session(), Error) << "the session has ended";
        }
        throw;
      }
    };
    const Outcomes all = outcomes_on(2, evaluate);
    EXPECT_EQ(all.said[1], "no std::exception") << stage;
    EXPECT_NE(all.said[0].find("no std::exception"), std::string::npos) << stage << all.said[0];
    EXPECT_NE(heard[1].find("no std::exception"), std::string::npos) << stage << heard[1];
  }
}

}  // namespace tessera::test
