// What runs leave in each other's logs: a training, what goes on with it, and what evaluates.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "run_options.h"
#include "tessera/train/logger.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::put;

TEST(Runs, WhatEvaluatesAppendsToTheLogOfTheTraining) {
  const Folder folder;
  const std::string csv = folder / "metrics.csv", json = folder / "metrics.jsonl";
  const auto options = [&](bool resume) {
    auto all = plain(folder / "checkpoints");
    all.checkpoint.resume = resume;
    all.loggers = {csv_logger(csv), json_logger(json)};
    return all;
  };
  auto training = options(false);
  training.callbacks = {keeping({.every_steps = 2})};
  struct Looks : Callback {
    explicit Looks(std::function<void()> what) : look(std::move(what)) {}
    std::string name() const override { return "looks"; }
    void on_step_end(Trainer& t, const StepResult&) override {
      if (t.step() == 5) look();
    }
    std::function<void()> look;
  };
  // Beside a training that goes on, from its checkpoint; then after it.
  training.callbacks.push_back(std::make_shared<Looks>([&] {
    Regression other;
    Trainer(options(true)).test(other, ragged_batches(0, 2));
  }));
  Regression task;
  Trainer(training).fit(task, ragged_batches(0, 7), ragged_batches(0, 1));
  for (const std::string& log : {contents(csv), contents(json)}) {
    EXPECT_NE(log.find("test/loss"), std::string::npos) << log;
    for (int step = 1; step <= 7; ++step)
      EXPECT_NE(
          log.find(log[0] == '{' ? concat("{\"step\": ", step, ",") : concat("\n", step, ",")),
          std::string::npos)
          << "step " << step << "\n"
          << log;
  }
  const std::string trained = contents(csv);
  for (const bool resume : {false, true}) {
    const std::string before = contents(csv);
    Regression other;
    Trainer(options(resume)).predict(other, ragged_batches(0, 2));
    EXPECT_EQ(contents(csv), before) << "a prediction logs nothing";
    Trainer(options(resume)).test(other, ragged_batches(0, 2));
    EXPECT_TRUE(contents(csv).starts_with(before)) << contents(csv);
    EXPECT_GT(contents(csv).size(), before.size());
  }
  EXPECT_FALSE(std::filesystem::exists(csv + ".1"));
  // What begins anew moves it aside.
  Regression fresh;
  Trainer(options(false)).fit(fresh, ragged_batches(0, 3));
  EXPECT_TRUE(contents(csv + ".1").starts_with(trained));
  EXPECT_EQ(contents(csv).find("\n4,"), std::string::npos);
  Regression third;
  Trainer(options(false)).fit(third, ragged_batches(0, 3));
  EXPECT_TRUE(contents(csv + ".1").starts_with(trained)) << "nothing is overwritten";
  EXPECT_TRUE(std::filesystem::exists(csv + ".2"));
}

TEST(Runs, ALogIsCutInTheFileThatAnotherJobHasOpen) {
  const Folder folder;
  const std::string csv = folder / "metrics.csv";
  const auto writes = csv_logger(csv), goes_on = csv_logger(csv), anew = csv_logger(csv);
  writes->start(0);
  for (std::int64_t step = 1; step <= 4; ++step) writes->log({{"a", 1}}, step, 0);
  writes->flush();
  goes_on->start(2);
  writes->log({{"b", 1}}, 5, 0);
  writes->flush();
  EXPECT_EQ(contents(csv).find("\n3,"), std::string::npos);
  EXPECT_NE(contents(csv).find("\n5,0"), std::string::npos) << contents(csv);
  // Lines of earlier steps behind later ones stay.
  writes->log({{"c", 1}}, 1, 0);
  writes->flush();
  goes_on->start(2);
  EXPECT_EQ(contents(csv).find("\n5,0"), std::string::npos);
  EXPECT_NE(contents(csv).find(",c,"), std::string::npos) << contents(csv);
  writes->log({{"d", 1}}, 6, 0);
  writes->flush();
  anew->start(0);
  writes->log({{"e", 1}}, 7, 0);
  writes->flush();
  EXPECT_NE(contents(csv + ".1").find(",e,"), std::string::npos) << "it goes on where it was";
  EXPECT_EQ(contents(csv), "step,epoch,seconds,name,value\n");
  // Behind a truncated line.
  put(csv, contents(csv) + "8,0,1.5,cut");
  const auto evaluates = csv_logger(csv);
  evaluates->append(8);
  evaluates->log({{"f", 1}}, 8, 0);
  evaluates->flush();
  EXPECT_NE(contents(csv).find("cut\n8,0,"), std::string::npos) << contents(csv);
}

// A run that is killed has no line in memory alone that lies before the checkpoint it goes on from.
TEST(Runs, ALogHasTheLinesOfBeforeACheckpoint) {
  struct Reads : Callback {
    explicit Reads(std::string path) : csv(std::move(path)) {}
    std::string name() const override { return "reads"; }
    void on_batch_start(Trainer& t, const MicroBatch&) override {
      if (t.step() == 3) there = contents(csv);
    }
    std::string csv, there;
  };
  const Folder folder;
  const std::string csv = folder / "metrics.csv";
  auto options = plain(folder / "checkpoints");
  const auto reads = std::make_shared<Reads>(csv);
  options.callbacks = {keeping({.every_steps = 3}), reads};
  options.loggers = {csv_logger(csv)};
  Regression task;
  Trainer(options).fit(task, ragged_batches(0, 5));
  for (const int step : {1, 2, 3})
    EXPECT_NE(reads->there.find(concat("\n", step, ",")), std::string::npos) << reads->there;
}

}  // namespace tessera::test
