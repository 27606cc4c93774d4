// A training out of a configuration file: trainer, mesh, strategy and plan.

#include "tessera/train/run_settings.h"

#include <filesystem>

#include "support.h"
#include "tessera/config/settings.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::thrown;

namespace {

RunSettings quiet() {
  RunSettings run;
  run.trainer.session.signals = false;
  run.trainer.progress.show = false;
  return run;
}

}  // namespace

TEST(RunSettings, AFileTrainsAsItsOptionsDo) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    RunSettings run = quiet();
    Settings settings;
    run.add_to(settings);
    settings.read_text(concat("strategy: mesh\n"
                              "mesh: {data: 1, tensor: 2}\n"
                              "batch: {data: 0}\n"
                              "plan: {\"0\": column, \"2\": row}\n"
                              "trainer: {max_epochs: 2, accumulate: 2, clip_norm: 0.5}\n"
                              "checkpoint: {folder: ",
                              folder / "run", ", every_steps: 2, keep_last: 0}\n",
                              "log: {folder: ", folder.path(), ", json: true, every_steps: 1}\n"),
                       "run.yaml");
    settings.set("trainer.max_steps=3");
    Regression task;
    const FitResult result =
        Trainer(run.make(manager, settings.resolved())).fit(task, ragged_batches(0, 4));
    EXPECT_EQ(result.steps, 3);
    EXPECT_TRUE(is_sharded(task.net->parameters()[0]));
    TrainerOptions same;
    same.session.signals = false;
    same.session.clip.max_norm = 0.5;
    same.accumulate = 2;
    same.max_epochs = 2;
    same.max_steps = 3;
    Regression alone;
    Trainer(same).fit(alone, ragged_batches(0, 4));
    expect_near(task.values(), alone.values(), "by file");
    // What was written is the same run.
    RunSettings again = quiet();
    Settings others;
    again.add_to(others);
    others.read_file(folder / "run/config.yaml");
    EXPECT_EQ(others.resolved(), settings.resolved());
    EXPECT_EQ(again.trainer.max_steps, 3);
  });
  for (const std::string file : {"metrics.csv", "metrics.jsonl", "run/step-2", "run/step-3"})
    EXPECT_TRUE(std::filesystem::exists(folder / file)) << file;
  EXPECT_FALSE(std::filesystem::exists(folder / "run/config.yaml.new"));
}

// Fields that lie differently, by name, out of a file, in each of the ways to read them.
TEST(RunSettings, FieldsByNameTrainAsOneProcess) {
  struct Rows : Regression {
    at::Tensor training_step(const MicroBatch& batch, Step&) override {
      const at::Tensor x = batch.field("x"), y = batch.field("y");
      if (is_sharded(x)) {
        EXPECT_EQ(placements(x), (std::vector<Placement>{Shard(0), Shard(1)}));
        EXPECT_EQ(placements(y), (std::vector<Placement>{Shard(0), Replicate()}));
      }
      return torch::mse_loss(net->forward(x), y);
    }
  };
  const auto batches = [](bool reads, Interval columns) {
    return batches_of([=](std::uint64_t, std::uint64_t index) -> std::optional<MicroBatch> {
      if (index == 4) return std::nullopt;
      MicroBatch batch = make_batch(ragged_data(0, static_cast<std::int64_t>(index)));
      batch.names = {"x", "y"};
      batch.tensors[0] = batch.tensors[0].slice(1, columns.begin, columns.end);
      if (!reads) batch.tensors.clear(), batch.names.clear();
      return batch;
    });
  };
  Rows alone;
  Trainer(quiet().trainer).fit(alone, batches(true, {0, 3}));
  on_threads(2, [&](DistributedManager& manager) {
    for (const std::string reads : {"shards", "complete", "one"}) {
      RunSettings run = quiet();
      Settings settings;
      run.add_to(settings);
      settings.read_text(concat("strategy: mesh\nranks: 2\nmesh: {data: -1, domain: 2}\n",
                                "batch: {data: 0}\nfields: {x: domain=1}\nreads: ", reads, "\n"),
                         "run.yaml");
      Rows task;
      const Interval mine = manager.rank() == 0 ? Interval{0, 2} : Interval{2, 3};
      Trainer(run.make(manager))
          .fit(task, batches(reads != "one" || manager.rank() == 0,
                             reads == "shards" ? mine : Interval{0, 3}));
      expect_near(task.values(), alone.values(), reads);
    }
  });
}

TEST(RunSettings, WhatCannotBeMadeIsRefused) {
  on_threads(1, [&](DistributedManager& manager) {
    const auto refusal = [&](const std::string& text) {
      RunSettings run = quiet();
      Settings settings;
      run.add_to(settings);
      settings.read_text(text, "run.yaml");
      return thrown<InvalidArgument>([&] { run.make(manager); });
    };
    EXPECT_NE(refusal("strategy: dpd").find("ddp"), std::string::npos);
    EXPECT_NE(refusal("mesh: {data: 1}").find("the strategy 'ddp' takes no mesh"),
              std::string::npos);
    EXPECT_NE(refusal("strategy: mesh").find("needs a mesh"), std::string::npos);
    EXPECT_NE(refusal("ranks: 4").find("4 ranks, and the job has 1"), std::string::npos);
    const std::string mesh = "strategy: mesh\nmesh: {data: 1, domain: 1}\n";
    EXPECT_NE(refusal(mesh + "batch: {domain: 2}\nfields: {x: domain=2}").find("beside fields"),
              std::string::npos);
    EXPECT_NE(refusal(mesh + "fields: {x: space=2}").find("no axis 'space'"), std::string::npos);
    for (const std::string text : {"domain", "domain=", "=2", "domain=x", "domain=-1"})
      EXPECT_NE(refusal(mesh + "fields: {x: '" + text + "'}").find("fields: 'x' is to be"),
                std::string::npos)
          << text;
    EXPECT_NE(refusal(mesh + "fields: {x: 'domain=1,domain=2'}").find("names an axis twice"),
              std::string::npos);
    EXPECT_NE(refusal("fields: {x: ''}").find("takes no mesh"), std::string::npos);
    // Where one rank reads for all, fields need not be named.
    EXPECT_NE(refusal("reads: one").find("takes no mesh"), std::string::npos);
    EXPECT_NE(refusal(mesh + "batch: {domain: 2}\nreads: one").find("beside fields or one rank"),
              std::string::npos);
    EXPECT_NE(refusal("strategy: mesh\nmesh: {data: 1}\nbatch: {domain: 2}")
                  .find("no axis 'domain'; its axes are [data]"),
              std::string::npos);
    EXPECT_NE(refusal("strategy: mesh\nmesh: {data: 1}\nplan: {a: row}").find("no axis 'tensor'"),
              std::string::npos);
    for (const std::string word : {"rows", "row(0)", "row(x)", "row(2", "vocabulary(2)", "row()"})
      EXPECT_NE(refusal(concat("strategy: mesh\nmesh: {tensor: 1}\nplan: {a: ", word, "}"))
                    .find("known are [column"),
                std::string::npos)
          << word;
    EXPECT_NE(refusal("early_stopping: {monitor: val/loss, patience: 0}").find("a patience of 0"),
              std::string::npos);
  });
}

TEST(RunSettings, APrecisionOfTheProgramsOwnIsAChoice) {
  struct Mine : PrecisionPlugin {
    std::string name() const override { return "mine"; }
  };
  const auto mine = std::make_shared<Mine>();
  for (const auto& [name, chosen] : std::vector<std::pair<std::string, PrecisionChoice>>{
           {"float64", Precision::float64}, {"mine", mine}}) {
    RunSettings run = quiet();
    run.trainer.session.precision = mine;
    Settings settings;
    run.add_to(settings);
    EXPECT_NE(settings.resolved().find("precision: mine"), std::string::npos);
    settings.set("trainer.precision=" + name);
    EXPECT_EQ(run.trainer.session.precision, chosen);
  }
}

}  // namespace tessera::test
