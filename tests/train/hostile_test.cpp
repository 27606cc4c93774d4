// Runs that are drawn: a network with buffers of every kind, a strategy, layers that are frozen and
// unfrozen, saves and validations of any frequency; interrupted by signals and exceptions in any
// phase, looked at by others, their checkpoints damaged. In the end they are what they would have
// been, bit by bit: values, averages, metrics, best checkpoints, logs and folders.

#include <filesystem>
#include <set>

#include "../support/hostile.h"
#include "trouble.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::Draws;
using ::tessera::testing::for_seeds;
using ::tessera::testing::put;

namespace {

enum class Kind { ddp, group, mesh };

struct Plan {
  Kind kind;
  int ranks, accumulate;
  std::int64_t micro, epochs, validate_every, log_every, freeze_from, freeze_to;
  bool background, schedule;
  CheckpointCallbackOptions saves;
};

Plan draw_plan(Draws& draw) {
  Plan plan;
  plan.kind = static_cast<Kind>(draw.below(3));
  plan.ranks = draw.between(1, 3);
  plan.accumulate = draw.between(1, 3);
  plan.micro = draw.between(2, 6);
  plan.epochs = draw.between(2, 3);
  plan.validate_every = draw.below(4);
  plan.log_every = draw.between(1, 3);
  // What was frozen when it was wrapped, DDP refuses to train.
  plan.freeze_from = plan.kind == Kind::ddp ? 0 : draw.between(0, 4);
  plan.freeze_to = plan.kind == Kind::ddp ? 0 : plan.freeze_from + draw.between(0, 4);
  plan.background = draw.chance(50);
  plan.schedule = draw.chance(50);
  plan.saves.every_steps = draw.between(1, 3);
  plan.saves.keep_last = draw.between(1, 2);
  if (draw.chance(60)) plan.saves.monitor = "val/loss";
  plan.saves.best = draw.between(1, 2);
  plan.saves.on_exception = draw.chance(50);
  plan.saves.at_end = draw.chance(70);
  return plan;
}

// What ends a life, on one rank.
struct End {
  std::string where;  // "": nothing; "signal"
  std::int64_t step = 0;
  int rank = 0;
};

End draw_end(Draws& draw, const Plan& plan) {
  static const std::vector<std::string> all{"forward",    "backward", "before", "after",
                                            "validation", "epoch",    "save",   "signal"};
  const std::int64_t steps = plan.epochs * ((plan.micro + plan.accumulate - 1) / plan.accumulate);
  return {draw.of(all), draw.between(1, static_cast<int>(steps)), draw.below(plan.ranks)};
}

// The first layer is frozen from one step on, and to another.
struct Freezes : Callback {
  Freezes(std::int64_t first, std::int64_t last) : from(first), to(last) {}
  std::string name() const override { return "freezes"; }
  void on_fit_start(Trainer& trainer) override { set(trainer); }
  void on_step_end(Trainer& trainer, const StepResult&) override { set(trainer); }
  void set(Trainer& trainer) const {
    const bool frozen = trainer.step() >= from && trainer.step() < to;
    for (at::Tensor& p : trainer.session().modules()[0].module->children()[0]->parameters())
      p.set_requires_grad(!frozen);
  }
  std::int64_t from, to;
};

struct Signals : Callback {
  explicit Signals(std::int64_t step) : at(step) {}
  std::string name() const override { return "signals"; }
  void on_step_end(Trainer& trainer, const StepResult&) override {
    if (trainer.step() == at) trainer.session().request_stop(Stop::terminated);
  }
  std::int64_t at;
};

class Scheduled : public Regression {
 public:
  explicit Scheduled(bool schedule) : Regression(remembering_net()), schedule_(schedule) {}
  std::vector<LearningRateSchedule> schedules() override {
    if (!schedule_) return {};
    return {{[](std::int64_t step, std::int64_t) { return 1.0 / (1.0 + 0.3 * double(step)); }}};
  }

 private:
  bool schedule_;
};

// As ragged_batches(): every rank is at the same place, so that one text serves all, also where the
// first rank alone saves.
class Together : public BatchSource {
 public:
  Together(int rank, std::int64_t micro) : batches_(ragged_batches(rank, micro)) {}
  std::optional<MicroBatch> next() override { return batches_->next(); }
  void start_epoch(std::uint64_t epoch) override { batches_->start_epoch(epoch); }
  std::string state() const override { return batches_->state(); }
  void restore(const std::string& state) override { batches_->restore(state); }
  bool ended() override { return batches_->ended(); }
  bool shared_state() const override { return true; }

 private:
  std::shared_ptr<BatchSource> batches_;
};

std::shared_ptr<Strategy> strategy_of(const Plan& plan, DistributedManager& manager) {
  if (plan.kind == Kind::ddp) return std::make_shared<DDPStrategy>(manager);
  if (plan.kind == Kind::group)
    return std::make_shared<ProcessGroupStrategy>(manager.world().process_group());
  return std::make_shared<MeshStrategy>(
      manager.mesh({{"data", manager.world_size()}}),
      NamedPlacements{{"net.0.weight", {{Shard(0)}}}, {"*.bias", {{Shard(0)}}}},
      std::vector{Shard(0)});
}

struct Outcome {
  std::vector<at::Tensor> values;
  std::map<std::string, double> metrics;
  std::int64_t steps = 0, epochs = 0;
  std::vector<std::pair<std::string, double>> best;
};

Outcome live(const Plan& plan, DistributedManager& manager, const std::string& folder,
             const End& end) {
  Scheduled task(plan.schedule);
  TrainerOptions options;
  options.strategy = strategy_of(plan, manager);
  options.session.signals = false;
  options.session.clip.max_norm = 0.7;
  options.max_epochs = plan.epochs;
  options.accumulate = plan.accumulate;
  options.validate_every_steps = plan.validate_every;
  options.log_every_steps = plan.log_every;
  options.checkpoint.folder = folder + "/checkpoints";
  options.checkpoint.resume = true;
  options.checkpoint.background = plan.background;
  options.checkpoint.options.timeout = std::chrono::seconds(20);
  options.loggers = {csv_logger(folder + "/metrics.csv")};
  options.progress = {.show = false, .log = false};  // no two runs have one pace
  const auto ema = std::make_shared<Ema>(0.8);
  const auto saves = std::make_shared<CheckpointCallback>(plan.saves);
  const bool mine = manager.rank() == end.rank;
  options.callbacks = {ema,
                       saves,
                       std::make_shared<ReduceOnPlateau>(
                           "val/loss", 0.7, EarlyStoppingOptions{.patience = 1, .least = 0.1}),
                       std::make_shared<Freezes>(plan.freeze_from, plan.freeze_to),
                       std::make_shared<Grenade>(end.where, end.step, mine),
                       std::make_shared<Signals>(end.where == "signal" && mine ? end.step : -1)};
  const FitResult result =
      Trainer(options).fit(task, std::make_shared<Together>(manager.rank(), plan.micro),
                           ragged_batches(manager.rank() + 7, 2));
  Outcome outcome{task.values(), result.metrics, result.steps, result.epochs, saves->best()};
  // Where the first rank alone saves, the others' running sums are not kept.
  if (plan.kind == Kind::group)
    std::erase_if(outcome.metrics, [](const auto& m) { return m.first.starts_with("train/"); });
  for (const auto& [name, t] : ema->average()) outcome.values.push_back(whole(t).clone());
  return outcome;
}

// The lines of a run, without times. What was logged between a checkpoint and the end of its step
// comes twice where the run was interrupted there.
std::set<std::string> logged(const std::string& folder) {
  std::set<std::string> lines;
  std::istringstream in(contents(folder + "/metrics.csv"));
  for (std::string line; std::getline(in, line);) {
    std::istringstream parts(line);
    std::string step, epoch, seconds, rest;
    std::getline(parts, step, ',');
    std::getline(parts, epoch, ',');
    std::getline(parts, seconds, ',');
    std::getline(parts, rest);
    lines.insert(concat(step, ',', epoch, ',', rest));
  }
  return lines;
}

std::set<std::string> listing(const std::string& folder) {
  std::set<std::string> all;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    all.insert(entry.path().string());
  return all;
}

std::vector<std::string> checkpoints(const std::string& folder) {
  const SingleDevice one;
  return Checkpointer(*one.manager(), folder + "/checkpoints").names();
}

// Another job evaluates what is there, while a save that looks incomplete is in the folder.
void look(const std::string& folder) {
  const std::string there = folder + "/checkpoints";
  std::filesystem::create_directories(there + "/step-999");
  put(there + "/step-999/rank-0.safetensors", "half");
  const auto before = listing(there);
  Scheduled other(false);
  TrainerOptions options;
  options.session.signals = false;
  options.checkpoint.folder = there;
  options.checkpoint.resume = true;
  Trainer(options).validate(other, ragged_batches(5, 2));
  EXPECT_EQ(listing(there), before) << "who looks changes nothing";
  std::filesystem::remove_all(there + "/step-999");
}

// The latest checkpoint is damaged: every rank is told, and nothing is lost but that one.
void damage(const Plan& plan, const std::string& folder, Draws& draw) {
  const auto names = checkpoints(folder);
  if (names.size() < 2) return;
  const std::string latest = folder + "/checkpoints/" + names.back();
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(latest))
    files.push_back(entry.path().string());
  std::ranges::sort(files);
  const std::string file = draw.of(files), text = contents(file);
  ASSERT_FALSE(text.empty()) << file;
  put(file, text.substr(0, static_cast<std::size_t>(draw.below(static_cast<int>(text.size())))));
  expect_all_told(
      outcomes_on(plan.ranks, [&](DistributedManager& m) { live(plan, m, folder, {}); }),
      names.back());
  std::filesystem::remove_all(latest);
}

void expect_same(const Outcome& got, const Outcome& expected, const std::string& what) {
  expect_equal(got.values, expected.values, what);
  EXPECT_EQ(got.metrics, expected.metrics) << what;
  EXPECT_EQ(got.steps, expected.steps) << what;
  EXPECT_EQ(got.epochs, expected.epochs) << what;
  EXPECT_EQ(got.best, expected.best) << what;
}

}  // namespace

TEST(HostileTraining, WhateverHappensTheRunBecomesWhatItWouldHaveBeen) {
  // 31: a run that went on from what an exception had left in its last step kept one too many.
  // 42, 46: what a callback threw while the state was taken left a checkpoint of half of it.
  // 1797064467: what an exception left counted on a best checkpoint that had been in flight.
  for_seeds({31, 42, 46, 1797064467}, 10, [](std::uint64_t seed) {
    Draws draw(seed);
    const Plan plan = draw_plan(draw);
    const Folder calm, rough;
    std::vector<Outcome> expected(static_cast<std::size_t>(plan.ranks));
    on_threads(plan.ranks, [&](DistributedManager& m) {
      expected[static_cast<std::size_t>(m.rank())] = live(plan, m, calm.path(), {});
    });
    std::string story = concat("kind ", static_cast<int>(plan.kind), ", ", plan.ranks, " ranks");
    for (int lives = draw.between(1, 3); lives > 0; --lives) {
      const End end = draw_end(draw, plan);
      story += concat("; ", end.where, " of rank ", end.rank, " at step ", end.step);
      // It may come to its end, where nothing passes there.
      outcomes_on(plan.ranks, [&](DistributedManager& m) { live(plan, m, rough.path(), end); });
      if (draw.chance(50)) look(rough.path());
      if (draw.chance(30)) damage(plan, rough.path(), draw);
    }
    on_threads(plan.ranks, [&](DistributedManager& m) {
      expect_same(live(plan, m, rough.path(), {}), expected[static_cast<std::size_t>(m.rank())],
                  story);
    });
    if (plan.kind != Kind::group) {
      EXPECT_EQ(logged(rough.path()), logged(calm.path())) << story;
    }
    // One that a signal or an exception left is one of the last, and may stay for another.
    const auto names = checkpoints(rough.path());
    const std::set<std::string> left(names.begin(), names.end());
    const Outcome& first = expected.front();
    for (const auto& [name, value] : first.best) EXPECT_TRUE(left.contains(name)) << story;
    if (plan.saves.at_end) {
      EXPECT_TRUE(left.contains(concat("step-", first.steps))) << story;
    }
    EXPECT_LE(left.size(), static_cast<std::size_t>(plan.saves.keep_last) + first.best.size() +
                               (plan.saves.at_end ? 0 : 1))
        << story << list(names);
  });
}

}  // namespace tessera::test
