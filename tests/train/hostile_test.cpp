// What a run of weeks meets: exceptions in the middle, checkpoints of other models, data that are
// not there, gradients that are not finite, a full disk, two runs in one process. All ranks are
// told the same, and the next run goes on.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "cases.h"
#include "tessera/comm/backends/gloo/gloo.h"

namespace tessera::test {

namespace {

using SteadyClock = std::chrono::steady_clock;

// Throws, on one rank, at a step and a station.
class Grenade : public Callback {
 public:
  Grenade(std::string where, std::int64_t step, bool armed)
      : where_(std::move(where)), step_(step), armed_(armed) {}
  std::string name() const override { return "grenade"; }
  void on_batch_start(Trainer& t, const MicroBatch&) override { pass("forward", t); }
  void on_after_backward(Trainer& t) override { pass("backward", t); }
  void on_validation_start(Trainer& t) override { pass("validation", t); }
  void on_step_end(Trainer& t, const StepResult&) override { pass("after", t); }
  void save(Trainer& t, CheckpointState&, const std::string&) override { pass("save", t); }
  void loaded(Trainer& t, const CheckpointState&, const std::string&) override { pass("load", t); }

 private:
  void pass(const std::string& here, Trainer& trainer) {
    if (armed_ && here == where_ && trainer.step() == step_) throw Error("a grenade in " + here);
  }
  std::string where_;
  std::int64_t step_;
  bool armed_;
};

TrainerOptions saving(std::shared_ptr<Strategy> strategy, const std::string& folder) {
  TrainerOptions options;
  options.strategy = std::move(strategy);
  options.session.signals = false;
  options.max_epochs = 2;
  options.accumulate = 2;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = true;
  return options;
}

// What each rank's call came to: "" or the message; how long the slowest one took.
struct Outcomes {
  std::vector<std::string> said;
  double seconds = 0;
};
Outcomes on_ranks(int ranks, const std::function<void(DistributedManager&)>& body) {
  Outcomes all{std::vector<std::string>(static_cast<std::size_t>(ranks)), 0};
  const auto began = SteadyClock::now();
  try {
    run_threads(ranks,
                [&](DistributedManager& manager) {
                  at::set_num_threads(1);
                  try {
                    body(manager);
                  } catch (const std::exception& e) {
                    all.said[static_cast<std::size_t>(manager.rank())] = e.what();
                    throw;
                  }
                },
                {.timeout = std::chrono::seconds(60)});
  } catch (const std::exception&) {  // each rank's own is kept
  }
  all.seconds = std::chrono::duration<double>(SteadyClock::now() - began).count();
  return all;
}
void expect_all_told(const Outcomes& all, const std::string& what) {
  for (std::size_t r = 0; r < all.said.size(); ++r)
    EXPECT_NE(all.said[r].find(what), std::string::npos) << "rank " << r << ": " << all.said[r];
  EXPECT_LT(all.seconds, 40) << what << ": the limit of the groups is 60 s";
}

std::vector<at::Tensor> run_with(DistributedManager& manager, TrainerOptions options,
                                 const std::string& where, std::int64_t step) {
  Regression task;
  const auto ema = std::make_shared<Ema>(0.8);
  options.callbacks.push_back(ema);
  options.callbacks.push_back(
      std::make_shared<Grenade>(where, step, manager.rank() == manager.world_size() - 1));
  Trainer(options).fit(task, ragged_batches(manager.rank(), 5),
                       ragged_batches(manager.rank() + 7, 2));
  auto all = task.values();
  for (const auto& [name, t] : ema->average()) all.push_back(t.clone());
  return all;
}

}  // namespace

// ---- exceptions ----

TEST(OnException, TheLastWholeStateIsSavedAndTheRunGoesOn) {
  for (const int ranks : {1, 3}) {
    std::vector<std::vector<at::Tensor>> expected(static_cast<std::size_t>(ranks));
    const auto run = [&](DistributedManager& manager, const std::string& folder,
                         const std::string& where) {
      auto options = saving(std::make_shared<DDPStrategy>(manager), folder);
      options.callbacks = {std::make_shared<CheckpointCallback>(
          CheckpointCallbackOptions{.at_end = false, .on_exception = true})};
      // An epoch has three steps.
      return run_with(manager, options, where, where == "validation" ? 3 : 4);
    };
    const Folder none;
    on_threads(ranks,
               [&](DistributedManager& m) { expected[m.rank()] = run(m, none / "full", ""); });
    for (const std::string where : {"forward", "backward", "validation", "after"}) {
      const Folder folder;
      expect_all_told(on_ranks(ranks, [&](DistributedManager& m) { run(m, folder.path(), where); }),
                      "a grenade in " + where);
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto names = Checkpointer(manager, folder.path()).names();
        // After the step, the averages of some ranks are those of the step before: nothing is
        // whole.
        std::vector<std::string> kept;
        if (where == "validation") kept = {"step-3"};
        if (where == "forward" || where == "backward") kept = {"step-4"};
        EXPECT_EQ(names, kept) << where;
        expect_equal(run(manager, folder.path(), ""), expected[manager.rank()], where);
      });
    }
  }
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
  expect_all_told(on_ranks(2, [&](DistributedManager& m) { run(m, folder.path(), "save", 4); }),
                  "a grenade in save");
  std::int64_t at = 0;
  on_threads(1, [&](DistributedManager& manager) {
    const auto latest = Checkpointer(manager, folder.path()).latest();
    ASSERT_TRUE(latest);
    at = std::stoll(latest->substr(5));
  });
  EXPECT_GE(at, 2);
  expect_all_told(on_ranks(2, [&](DistributedManager& m) { run(m, folder.path(), "load", at); }),
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
          on_ranks(2, [&](DistributedManager& m) { run(m, folder.path(), where, step); }),
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
        throw FileError(concat("'", file.path, "': No space left on device"));
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
  expect_all_told(on_ranks(2, [&](DistributedManager& m) { run(m, folder.path(), true); }),
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
  expect_all_told(on_ranks(3,
                           [](DistributedManager& manager) {
                             Regression task;
                             Trainer(with(std::make_shared<Breaks>(manager), 1))
                                 .fit(task, ragged_batches(manager.rank(), 5));
                           }),
                  "the wire is cut");
}

// ---- checkpoints of something else ----

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
    expect_all_told(on_ranks(2,
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
  refused([] { return std::make_shared<Custom>(small_net(), 1, 1); }, "parameter groups");
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
      "is not in the checkpoint");
}

TEST(Hostile, AnotherAccumulationOnResumeUsesEachBatchOnce) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    std::vector<std::int64_t> seen;
    const auto source = [&] {
      return batches_of([&](std::uint64_t epoch, std::uint64_t i) -> std::optional<MicroBatch> {
        if (i >= 7) return std::nullopt;
        seen.push_back(static_cast<std::int64_t>(epoch * 7 + i));
        return make_batch(ragged_data(manager.rank(), static_cast<std::int64_t>(i)));
      });
    };
    for (const int accumulate : {2, 3, 1}) {
      Regression task;
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
    return on_ranks(3, [&](DistributedManager& manager) {
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
                  "rank 0 has 'max_steps 3', rank 2 has 'max_steps 30'");
  expect_all_told(fit([](TrainerOptions& o, int rank) { o.accumulate = 1 + rank / 2; }, false),
                  "rank 0 has 'accumulate 1', rank 2 has 'accumulate 2'");
  expect_all_told(fit(none, true), "a validation source");
  for (const std::string& said : fit(none, false).said) EXPECT_EQ(said, "");
}

// ---- data that are not there ----

TEST(Hostile, WithoutBatchesAnEpochIsAnErrorNotALoop) {
  const auto fit = [](DistributedManager& manager, std::int64_t batches, UnevenData policy,
                      std::int64_t steps = 10) {
    Regression task;
    auto options = with(std::make_shared<DDPStrategy>(manager), 1);
    options.max_epochs = -1;
    options.max_steps = steps;
    options.uneven = policy;
    Trainer(options).fit(task, ragged_batches(manager.rank(), batches));
  };
  for (const UnevenData policy :
       {UnevenData::error, UnevenData::drop, UnevenData::pad, UnevenData::weight_zero})
    expect_all_told(on_ranks(2, [&](DistributedManager& m) { fit(m, 0, policy); }), "has no batch");
  // One rank has none.
  const auto one = [&](UnevenData policy) {
    return on_ranks(2, [&](DistributedManager& m) { fit(m, m.rank() == 1 ? 0 : 3, policy, 5); });
  };
  expect_all_told(one(UnevenData::drop), "has no batch");
  expect_all_told(one(UnevenData::error), "different numbers of batches");
  for (const UnevenData policy : {UnevenData::pad, UnevenData::weight_zero})
    for (const std::string& said : one(policy).said) EXPECT_EQ(said, "");
  // Batches without rows, on all ranks at once: there is nothing to divide by.
  expect_all_told(on_ranks(2,
                           [](DistributedManager& manager) {
                             Regression task;
                             const auto none = make_batch(
                                 {at::zeros({0, 3}, at::kDouble), at::zeros({0, 2}, at::kDouble)});
                             Trainer(with(std::make_shared<DDPStrategy>(manager), 1))
                                 .fit(task, batches_of(std::vector<MicroBatch>{none}));
                           }),
                  "not all zero");
}

TEST(Hostile, UnevenDataUnderEveryPolicyWithAccumulationAndValidation) {
  // Rank r trains on 4 - r batches and validates on 3 - r.
  for (const UnevenData policy : {UnevenData::drop, UnevenData::pad, UnevenData::weight_zero}) {
    constexpr int kRanks = 3;
    const auto counted = [](int rank, std::int64_t count, std::int64_t from) {
      return batches_of([=](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
        if (static_cast<std::int64_t>(i) >= count) return std::nullopt;
        return make_batch(ragged_data(rank, from + static_cast<std::int64_t>(i)));
      });
    };
    const auto joined = [&](std::int64_t most, std::int64_t from, std::int64_t join) {
      return batches_of([=](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
        std::vector<at::Tensor> x, y;
        for (std::int64_t k = static_cast<std::int64_t>(i) * join;
             k < (static_cast<std::int64_t>(i) + 1) * join; ++k) {
          for (int r = 0; r < kRanks; ++r) {
            if (k >= (policy == UnevenData::drop ? most - kRanks + 1 : most - r)) continue;
            const auto one = ragged_data(r, from + k);
            x.push_back(one[0]), y.push_back(one[1]);
          }
        }
        if (x.empty()) return std::nullopt;
        return make_batch({at::cat(x), at::cat(y)});
      });
    };
    Regression alone_task;
    const FitResult expected =
        Trainer(with(nullptr, 1)).fit(alone_task, joined(4, 0, 2), joined(3, 20, 1));
    on_threads(kRanks, [&](DistributedManager& manager) {
      Regression task;
      auto options = with(std::make_shared<DDPStrategy>(manager), 2);
      options.uneven = options.uneven_validation = policy;
      const int me = manager.rank();
      const FitResult result =
          Trainer(options).fit(task, counted(me, 4 - me, 0), counted(me, 3 - me, 20));
      EXPECT_EQ(result.steps, expected.steps);
      expect_near(task.values(), alone_task.values(), "uneven");
      EXPECT_NEAR(result.metrics.at("val/loss"), expected.metrics.at("val/loss"), 1e-10);
      EXPECT_EQ(result.metrics.at("val/rows"), expected.metrics.at("val/rows"));
    });
  }
  const auto refuse = [](std::int64_t train, std::int64_t validate) {
    return on_ranks(2, [=](DistributedManager& manager) {
      Regression task;
      auto options = with(std::make_shared<DDPStrategy>(manager), 2);
      options.uneven = options.uneven_validation = UnevenData::error;
      const int me = manager.rank();
      Trainer(options).fit(task, ragged_batches(me, 3 + me * train),
                           ragged_batches(me, 2 + me * validate));
    });
  };
  expect_all_told(refuse(1, 0), "different numbers of batches");
  expect_all_told(refuse(0, 1), "different numbers of batches");
}

// ---- numbers that are not finite ----

TEST(Hostile, GradientsThatAreNotFiniteThrowOrAreLeftOut) {
  class Bad : public Regression {
   public:
    explicit Bad(bool bad) : bad_(bad) {}
    at::Tensor training_step(const MicroBatch& batch, Step& step) override {
      const at::Tensor loss = Regression::training_step(batch, step);
      return bad_ && step.step() == 1 ? loss * std::nan("") : loss;
    }

   private:
    bool bad_;
  };
  const auto run = [](DistributedManager& manager, NonFinite what) {
    Bad task(manager.rank() == 0);
    auto options = with(std::make_shared<DDPStrategy>(manager), 1);
    options.max_epochs = 1;
    options.session.non_finite = what;
    struct Count : Callback {
      std::string name() const override { return "count"; }
      void on_step_end(Trainer&, const StepResult& result) override {
        stepped.push_back(result.stepped);
      }
      std::vector<bool> stepped;
    };
    const auto count = std::make_shared<Count>();
    options.callbacks = {count};
    Trainer(options).fit(task, ragged_batches(manager.rank(), 4));
    EXPECT_EQ(count->stepped, (std::vector<bool>{true, what == NonFinite::step, true, true}));
    EXPECT_EQ(at::isfinite(task.net->parameters()[0]).all().item<bool>(), what == NonFinite::skip);
  };
  for (const int ranks : {1, 3})
    expect_all_told(on_ranks(ranks, [&](DistributedManager& m) { run(m, NonFinite::error); }),
                    "are not finite");
  on_threads(2, [&](DistributedManager& m) {
    run(m, NonFinite::skip);
    run(m, NonFinite::step);
  });
  // A loss that is never finite: the scale of float16 shrinks to its end, on all ranks alike.
  expect_all_told(on_ranks(2,
                           [](DistributedManager& manager) {
                             class Never : public Regression {
                              public:
                               at::Tensor training_step(const MicroBatch& b, Step& s) override {
                                 return Regression::training_step(b, s) * INFINITY;
                               }
                             } task;
                             auto options = with(std::make_shared<DDPStrategy>(manager), 1);
                             options.max_epochs = 20;
                             options.session.precision = Precision::float16_mixed;
                             options.session.scaler = {.initial = 4, .smallest = 0.5};
                             Trainer(options).fit(task, ragged_batches(manager.rank(), 4));
                           }),
                  "the loss itself is not finite");
}

// ---- several runs in one process ----

TEST(Hostile, FitTwiceAndTwoTrainersOfOneStrategy) {
  for (const bool sharded : {false, true}) {
    on_threads(2, [&](DistributedManager& manager) {
      const auto make = [&]() -> std::shared_ptr<Strategy> {
        if (!sharded) return std::make_shared<DDPStrategy>(manager);
        return std::make_shared<MeshStrategy>(manager.mesh({{"data", 2}}),
                                              NamedPlacements{{"*.weight", {{Shard(0)}}}},
                                              std::vector{Shard(0)});
      };
      const auto source = [&](int from) { return ragged_batches(manager.rank() + from, 4); };
      Regression expected;
      {
        const auto ddp = [&] { return std::make_shared<DDPStrategy>(manager); };
        Trainer(with(ddp(), 2)).fit(expected, source(0));
        Regression other(expected.net);
        Trainer(with(ddp(), 2)).fit(other, source(3));
      }
      // The same trainer, the same task, again.
      Regression task;
      const auto strategy = make();
      Trainer trainer(with(strategy, 2));
      trainer.fit(task, source(0));
      EXPECT_EQ(trainer.fit(task, source(3)).steps, 4);
      expect_near(task.values(), expected.values(), "fit twice");
      // The end of one trainer is not the end of another one's strategy.
      Regression again;
      auto first = std::make_unique<Trainer>(with(strategy, 2));
      Regression unused;
      first->fit(unused, source(1));
      struct End : Callback {
        std::string name() const override { return "end"; }
        void on_fit_start(Trainer&) override { trainer->reset(); }
        std::unique_ptr<Trainer>* trainer;
      };
      const auto end = std::make_shared<End>();
      end->trainer = &first;
      auto options = with(strategy, 2);
      options.callbacks = {end};
      Trainer second(options);
      second.fit(again, source(0));
      second.fit(again, source(3));
      expect_near(again.values(), expected.values(), "two trainers");
    });
  }
}

// ---- abilities, optimizers and groups of the user's ----

TEST(Strategies, OneThatRestoresBeforeSetupGetsTheValuesFirst) {
  class Early : public DDPStrategy {
   public:
    using DDPStrategy::DDPStrategy;
    Abilities abilities() const override {
      Abilities can = DDPStrategy::abilities();
      can.restores_after_setup = false;
      return can;
    }
    void setup(const NamedModules& modules) override {
      for (const at::Tensor& p : modules[0].module->parameters())
        seen.push_back(p.detach().clone());
      DDPStrategy::setup(modules);
    }
    std::vector<at::Tensor> seen;
  };
  const Folder folder, none;
  on_threads(2, [&](DistributedManager& manager) {
    const auto run = [&](const std::shared_ptr<Early>& strategy, const std::string& path,
                         std::int64_t steps) {
      Regression task;
      auto options = saving(strategy, path);
      options.max_steps = steps;
      options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
      Trainer(options).fit(task, ragged_batches(manager.rank(), 5));
      return task.values();
    };
    const auto expected = run(std::make_shared<Early>(manager), none / "full", -1);
    const auto half = run(std::make_shared<Early>(manager), folder.path(), 2);
    const auto strategy = std::make_shared<Early>(manager);
    expect_equal(run(strategy, folder.path(), -1), expected, "resumed");
    expect_equal(strategy->seen, half, "before setup");
    // A session that was not given it cannot load.
    Regression task;
    Session session(std::make_shared<Early>(manager), task.modules(), {.signals = false});
    session.add(task.optimizers()[0]);
    const auto latest = Checkpointer(manager, folder.path()).latest();
    ASSERT_TRUE(latest);
    EXPECT_THROW(session.load(CheckpointReader(manager.world(), folder.path(), *latest)),
                 InvalidArgument);
  });
}

namespace {

// An optimizer that calls the loss again.
class Searching : public Regression {
 public:
  Optimizers optimizers() override { return {make()}; }
  std::shared_ptr<torch::optim::Optimizer> make() {
    return std::make_shared<torch::optim::LBFGS>(
        net->parameters(),
        torch::optim::LBFGSOptions(0.5).max_iter(4).history_size(3).line_search_fn("strong_wolfe"));
  }
  bool automatic() const override { return !manual; }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    const auto loss = [&] {
      return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
    };
    if (!manual) return loss();
    step.session().step_again(
        [&] { step.session().micro_batch(loss, static_cast<double>(batch.real)); });
    return {};
  }
  bool manual = true;
};

}  // namespace

TEST(Trainer, OptimizersThatCallTheLossAgainOnAnyRanksAndResumed) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    // The definition, without a trainer.
    Searching plain;
    const auto optimizer = plain.make();
    const auto source = joined_batches(ranks, 5, 1);
    source->start_epoch(0);
    while (const auto batch = source->next())
      optimizer->step([&] {
        optimizer->zero_grad();
        const at::Tensor loss =
            torch::mse_loss(plain.net->forward(batch->tensors[0]), batch->tensors[1]);
        loss.backward();
        return loss;
      });
    const Folder folder, none;
    std::vector<at::Tensor> straight;
    const auto run = [&](DistributedManager& manager, const std::string& path, std::int64_t steps) {
      Searching task;
      auto options = saving(std::make_shared<DDPStrategy>(manager), path);
      options.max_epochs = 1;
      options.accumulate = 1;
      options.max_steps = steps;
      options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
      const FitResult result = Trainer(options).fit(task, ragged_batches(manager.rank(), 5));
      EXPECT_EQ(result.steps, steps < 0 ? 5 : steps);
      return task.values();
    };
    on_threads(ranks, [&](DistributedManager& m) {
      const auto full = run(m, none / "full", -1);
      expect_near(full, plain.values(), concat(ranks, " ranks"), 1e-7);
      for (const std::int64_t steps : {1, 3}) run(m, folder.path(), steps);
      expect_equal(run(m, folder.path(), -1), full, "resumed");
    });
  }
  Searching automatic;
  automatic.manual = false;
  EXPECT_THROW(Trainer(with(nullptr, 1)).fit(automatic, ragged_batches(0, 2)), NotAvailable);
}

// A store and a group of the program's own, of which the library has seen nothing.
TEST(Strategies, AStoreAndAGroupOfTheProgram) {
  const auto expected = alone(3, 4, 1, with(nullptr, 1));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group_of = [&](int rank, const std::string& name) {
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(name, store);
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, rank, 3);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                      make_gloo_backend(prefixed, rank, 3, std::chrono::seconds(10)));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    return group;
  };
  std::mutex mutex;
  std::vector<std::string> said(3);
  std::vector<std::thread> threads;
  const auto began = SteadyClock::now();
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        Regression task;
        Trainer(with(std::make_shared<ProcessGroupStrategy>(group_of(rank, "a")), 1))
            .fit(task, ragged_batches(rank, 4));
        const std::lock_guard lock(mutex);
        expect_near(task.values(), expected, "a group of the program");
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
      // An exception of one rank ends the others', though nobody can say why.
      try {
        Regression task;
        auto options = with(std::make_shared<ProcessGroupStrategy>(group_of(rank, "b")), 1);
        options.callbacks = {std::make_shared<Grenade>("forward", 2, rank == 1)};
        Trainer(options).fit(task, ragged_batches(rank, 4));
      } catch (const std::exception& e) {
        const std::lock_guard lock(mutex);
        said[static_cast<std::size_t>(rank)] = e.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(SteadyClock::now() - began, std::chrono::seconds(30));
  for (const std::string& what : said) EXPECT_FALSE(what.empty());
  EXPECT_NE(said[1].find("a grenade"), std::string::npos) << said[1];
}

}  // namespace tessera::test
