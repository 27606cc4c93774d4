// What a run says of itself: lines and the bar by a clock of the test's, and what ranks measure.

#include "tessera/train/progress.h"

#include <cmath>
#include <sstream>

#include "support.h"
#include "tessera/train/detail/run_meter.h"
#include "tessera/train/logger.h"

namespace tessera::test {

using detail::Pace;
using ::tessera::testing::contents;

namespace {

using Time = std::chrono::steady_clock::time_point;

// Regression whose steps take so many seconds by a clock that nothing else moves.
class Timed : public Regression {
 public:
  explicit Timed(double seconds) : seconds_(seconds) {}
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    now += std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds_));
    return Regression::training_step(batch, step);
  }
  std::function<Time()> clock() {
    return [this] { return now; };
  }
  Time now{};

 private:
  double seconds_;
};

// Three rows on every rank.
std::shared_ptr<BatchSource> even_batches(std::size_t micro) {
  const MicroBatch one = make_batch({at::ones({3, 3}, at::kDouble), at::ones({3, 2}, at::kDouble)});
  return batches_of(std::vector<MicroBatch>(micro, one));
}

std::string without(const std::string& text, const std::string& unwanted) {
  std::istringstream in(text);
  std::string kept;
  for (std::string line; std::getline(in, line);)
    if (line.find(unwanted) == std::string::npos) kept += line + "\n";
  return kept;
}

}  // namespace

TEST(Progress, ALineAMinuteWhereNoTerminalIs) {
  std::ostringstream out;
  Time now{};
  Progress progress({.out = &out, .clock = [&] { return now; }});
  progress.start(10, 100);
  for (int step = 0; step < 15; ++step) {
    now += std::chrono::seconds(step < 12 ? 10 : 40);
    progress.step(3, [&] { return concat("loss ", step); });
  }
  progress.say("saved");
  progress.expect(-1);
  now += std::chrono::seconds(1);
  progress.step();
  progress.finish();
  progress.finish();
  EXPECT_EQ(out.str(),
            "step 16 of 100 (16%), 0.1 steps/s, 0.3 samples/s, loss 5, 14 min left\n"
            "step 22 of 100 (22%), 0.1 steps/s, 0.3 samples/s, loss 11, 13 min left\n"
            "step 24 of 100 (24%), 0.0571 steps/s, 0.171 samples/s, loss 13, 22 min 10 s left\n"
            "saved\n"
            "step 26, 0.0331 steps/s, 0.0744 samples/s\n");
  EXPECT_EQ(progress.seconds(), 241);
}

TEST(Progress, ABarOnATerminal) {
  std::ostringstream out;
  Time now{};
  {
    Progress progress({.out = &out, .columns = 72, .unit = "tokens", .clock = [&] { return now; }});
    progress.start(0, 4);
    for (int step = 0; step < 4; ++step) {
      now += std::chrono::milliseconds(step == 1 ? 50 : 200);  // the second one is too early
      progress.step(1e6);
      if (step == 2) progress.say("saved");
    }
    progress.finish();
  }
  const std::string rest(53, ' ');
  const std::string last = "━━━━━━━━━━━━━━━━━  100%  4/4  6.15 steps/s  6.15M tokens/s";
  EXPECT_EQ(out.str(),
            "\r━━─────────  25%  1/4  5 steps/s  5M tokens/s  600 ms left\r"
            "\r━━━──  75%  3/4  6.67 steps/s  6.67M tokens/s  150 ms left\r"
            "\rsaved" +
                rest + "\n\r" + last + "\r\r" + last + "\n");
  std::ostringstream open;
  {
    Progress progress({.out = &open, .columns = 60, .clock = [&] { return now; }});
    progress.start(0, 2);
    now += std::chrono::seconds(1);
    progress.step();
  }
  EXPECT_EQ(open.str().back(), '\n') << "what is written next begins on a line of its own";
  std::ostringstream none;
  Progress silent({.show = false, .out = &none, .line_interval = std::chrono::milliseconds(0)});
  silent.step();
  silent.say("saved");
  silent.finish();
  EXPECT_EQ(none.str(), "");
}

TEST(Progress, TimesAndCountsAsText) {
  const std::vector<std::pair<double, std::string>> times = {{0, "0 s"},
                                                             {35e-6, "35 us"},
                                                             {1.23e-3, "1.2 ms"},
                                                             {0.9996, "1 s"},
                                                             {9.96, "10 s"},
                                                             {59.4, "59 s"},
                                                             {60, "1 min"},
                                                             {72, "1 min 12 s"},
                                                             {3599.6, "1 h"},
                                                             {7500, "2 h 5 min"},
                                                             {86400, "1 d"},
                                                             {273600, "3 d 4 h"},
                                                             {-1, "0 s"},
                                                             {HUGE_VAL, "a long time"},
                                                             {std::nan(""), "a long time"}};
  for (const auto& [seconds, text] : times) EXPECT_EQ(duration_text(seconds), text) << seconds;
  const std::vector<std::pair<double, std::string>> counts = {
      {0, "0"}, {0.1, "0.1"}, {12.34, "12.3"}, {999.4, "999"}, {999.6, "1k"}, {1.5e12, "1.5T"}};
  for (const auto& [value, text] : counts) EXPECT_EQ(count_text(value), text) << value;
}

TEST(Progress, WhatTheRanksMeasuredComesToNumbersAndSentences) {
  const Pace a{
      .steps = 4, .seconds = 2, .waited = 1, .weight = 40, .bytes = 6, .flop = 3e9, .memory = 5e6};
  const Pace b{.steps = 4,
               .seconds = 2,
               .waited = 0.2,
               .weight = 40,
               .bytes = 2,
               .flop = 1e9,
               .memory = 7e6};
  const std::map<std::string, double> expected{{"throughput/steps", 2},  {"throughput/samples", 20},
                                               {"throughput/bytes", 4},  {"throughput/flop", 2e9},
                                               {"throughput/mfu", 0.25}, {"memory/peak", 7e6},
                                               {"memory/peak_rank", 1},  {"time/step", 0.5},
                                               {"time/waited", 0.15},    {"time/slowest_rank", 1}};
  EXPECT_EQ(detail::pace_values({a, b}, 4e9), expected);
  EXPECT_EQ(
      detail::pace_lines({a, b}, 4e9, 61, "cells"),
      (std::vector<std::string>{
          "trained 4 steps in 1 min 1 s: 2 steps/s, 20 cells/s, 2GFLOP/s (25% of the peak)",
          "  peak memory 7MB, on rank 1",
          "  a step took 500 ms, of which 150 ms (30%) waiting for others; rank 1 waited least"}));
  // One process waits for nobody; without a peak there is no utilisation.
  const auto alone = detail::pace_values({a}, 0);
  for (const std::string name : {"throughput/mfu", "time/waited", "time/slowest_rank"})
    EXPECT_FALSE(alone.contains(name)) << name;
  EXPECT_TRUE(detail::pace_values({Pace()}, 0).empty()) << "no step, no pace";
  EXPECT_EQ(detail::pace_lines({Pace()}, 0, 0, "samples").front(), "trained 0 steps in 0 s");
}

TEST(Progress, ATrainerSpeaksOnItsFirstRankAlone) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    for (const bool resumes : {false, true}) {
      Timed task(20);
      std::ostringstream out;
      TrainerOptions options;
      options.strategy = std::make_shared<DDPStrategy>(manager);
      options.session.signals = false;
      options.max_epochs = resumes ? 2 : 1;
      options.log_every_steps = 2;
      options.checkpoint.folder = folder / "run";
      options.checkpoint.resume = resumes;
      options.checkpoint.background = !resumes;
      options.callbacks = {
          std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{.every_steps = 3})};
      options.progress = {.out = &out, .clock = task.clock(), .metrics = {"train/mse"}};
      Trainer(options).fit(task, even_batches(4), even_batches(1));
      if (manager.rank() != 0) {
        EXPECT_EQ(out.str(), "");
        continue;
      }
      const std::string said = without(without(out.str(), "saved step-"), "peak memory");
      const std::string begins =
          resumes ? "resumed from step-4\ntraining from step 4 to 8" : "training from step 0 to 4";
      const int at = resumes ? 7 : 3;
      EXPECT_TRUE(said.starts_with(concat(begins, " on 2 ranks (ddp)\nstep ", at, " of ", at + 1)))
          << out.str();
      EXPECT_NE(said.find(concat("%), 0.05 steps/s, 0.3 samples/s, ",
                                 resumes ? "epoch 2 of 2, " : "", "train/mse ")),
                std::string::npos)
          << said;
      EXPECT_NE(said.find("20 s left\n"), std::string::npos) << said;
      EXPECT_NE(said.find("trained 4 steps in 1 min 20 s: 0.05 steps/s, 0.3 samples/s, "),
                std::string::npos)
          << said;
      EXPECT_NE(said.find("  a step took 20 s, of which "), std::string::npos) << said;
      for (const std::string step : resumes ? std::vector{"6", "8"} : std::vector{"3", "4"})
        EXPECT_NE(out.str().find(concat("saved step-", step, " (")), std::string::npos)
            << out.str();
      EXPECT_NE(out.str().find("B on rank 0, "), std::string::npos) << out.str();
    }
  });
}

// By the test's clock each step takes both ranks 20 s, of which rank 0 waits for 15 s; what they
// really wait for each other comes on top, which is never as much.
TEST(Progress, TheSlowestRankIsTheOneThatWaitsLeast) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    struct Waits : Timed {
      explicit Waits(bool waits) : Timed(20), waiting(waits ? 15 : 0) {}
      at::Tensor training_step(const MicroBatch& batch, Step& step) override {
        WaitTime::add(waiting);
        return Timed::training_step(batch, step);
      }
      const std::chrono::seconds waiting;
    } task(manager.rank() == 0);
    std::ostringstream out;
    TrainerOptions options;
    options.strategy = std::make_shared<DDPStrategy>(manager);
    options.session.signals = false;
    options.log_every_steps = 3;
    options.loggers = {csv_logger(folder / "metrics.csv"), json_logger(folder / "metrics.jsonl")};
    options.progress = {.out = &out, .clock = task.clock(), .peak_flop = 1e9};
    Trainer(options).fit(task, even_batches(3));
    if (manager.rank() == 0) {
      EXPECT_NE(out.str().find("; rank 1 waited least"), std::string::npos) << out.str();
      EXPECT_NE(out.str().find("% of the peak)"), std::string::npos) << out.str();
    }
  });
  const std::string csv = contents(folder / "metrics.csv");
  for (const std::string& log : {csv, contents(folder / "metrics.jsonl")})
    for (const std::string name :
         {"throughput/steps", "throughput/samples", "throughput/bytes", "throughput/flop",
          "throughput/mfu", "memory/peak", "memory/peak_rank", "time/step", "time/waited"})
      EXPECT_NE(log.find(name), std::string::npos) << name << "\n" << log;
  EXPECT_NE(csv.find("time/slowest_rank,1\n"), std::string::npos) << csv;
  // Of two ranks the mean, with the waits in calls of the group.
  const std::string waited = "time/waited,";
  ASSERT_NE(csv.find(waited), std::string::npos) << csv;
  EXPECT_GT(std::stod(csv.substr(csv.find(waited) + waited.size())), 7.5) << csv;
}

// Of each row the forward of two layers, the gradients of both weights, and that of the second
// layer's input: 2 (3 x 5) x 2 + 2 (5 x 2) x 3 FLOP, whatever rank has the row.
TEST(Progress, FlopOfARunAreCountedByHandToo) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Timed task(1);
      struct Seen : Callback {
        std::string name() const override { return "seen"; }
        void on_log(Trainer&, const std::map<std::string, double>& values) override {
          for (const auto& [name, value] : values) last[name] = value;
        }
        std::map<std::string, double> last;
      };
      const auto seen = std::make_shared<Seen>();
      TrainerOptions options;
      options.strategy = std::make_shared<DDPStrategy>(manager);
      options.session.signals = false;
      options.log_every_steps = 4;
      options.callbacks = {seen};
      options.progress = {.show = false, .clock = task.clock()};
      Trainer(options).fit(task, even_batches(4));
      if (manager.rank() == 0) {
        EXPECT_DOUBLE_EQ(seen->last.at("throughput/flop"), ranks * 3 * (60.0 + 60.0));
        EXPECT_DOUBLE_EQ(seen->last.at("throughput/samples"), ranks * 3.0);
        EXPECT_EQ(seen->last.contains("time/waited"), ranks > 1);
      } else {
        EXPECT_FALSE(seen->last.contains("throughput/flop"));
      }
      options.progress.log = false;
      seen->last.clear();
      Timed other(1);
      Trainer(options).fit(other, even_batches(4));
      EXPECT_FALSE(seen->last.contains("throughput/flop"));
      EXPECT_TRUE(seen->last.contains("train/loss"));
    });
  }
}

TEST(Progress, WhoStopsARunIsTold) {
  std::ostringstream out;
  Regression task;
  TrainerOptions options;
  options.session.signals = false;
  options.max_epochs = 9;
  options.callbacks = {std::make_shared<Timer>(std::chrono::milliseconds(0))};
  options.progress = {.out = &out};
  Trainer(options).fit(task, even_batches(4));
  EXPECT_NE(out.str().find("epoch 1 of 9, train/loss "), std::string::npos) << out.str();
  EXPECT_NE(
      out.str().find("\nstopped as requested: the limit of 0 ms is over\ntrained 2 steps in "),
      std::string::npos)
      << out.str();
}

TEST(Progress, AMetricThatIsNeverLoggedIsTold) {
  Regression task;
  TrainerOptions options;
  options.session.signals = false;
  options.progress = {.show = false, .metrics = {"train/acuracy"}};
  ::testing::internal::CaptureStderr();
  Trainer(options).fit(task, even_batches(1));
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("'train/acuracy', which was not logged; known are [train/loss"),
            std::string::npos)
      << said;
}

}  // namespace tessera::test
