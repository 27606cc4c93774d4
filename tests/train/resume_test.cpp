// A run that is interrupted after any step and goes on from its checkpoint equals one that is not:
// parameters, optimizers, metrics, averages and what callbacks decide, bit for bit on the same
// ranks.

#include "support.h"
#include "tessera/train/generators.h"

namespace tessera::test {

namespace {

struct Outcome {
  std::vector<at::Tensor> values, average;
  std::map<std::string, double> metrics;
  std::int64_t steps = 0, epochs = 0;
};

enum class Kind { ddp, sharded };

// A run of 3 epochs with 5 micro-batches, two a step; everything that has a state takes part.
// `stop_at`: a step after which it is interrupted, as by a signal; 0: never.
Outcome run(DistributedManager& manager, Kind kind, const std::string& folder, std::int64_t stop_at,
            bool dropout = false) {
  struct Interrupt : Callback {
    explicit Interrupt(std::int64_t at) : at(at) {}
    std::string name() const override { return "interrupt"; }
    void on_step_end(Trainer& trainer, const StepResult&) override {
      // On the last rank alone; noticed by all at the next step's vote.
      if (at > 0 && trainer.step() == at &&
          trainer.strategy().rank() == trainer.strategy().size() - 1)
        trainer.session().request_stop(Stop::terminated);
    }
    std::int64_t at;
  };
  torch::nn::Sequential net = remembering_net();
  if (dropout) {
    net = torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::Dropout(0.3),
                                torch::nn::Linear(5, 2));
    net->to(at::kDouble);
    fill(*net, 3);
  }
  Regression task(net);
  TrainerOptions options;
  if (kind == Kind::ddp) {
    options.strategy = std::make_shared<DDPStrategy>(manager);
  } else {
    options.strategy = std::make_shared<MeshStrategy>(
        manager.mesh({{"data", manager.world_size()}}),
        NamedPlacements{{"net.0.weight", {{Shard(0)}}}, {"*.bias", {{Shard(0)}}}},
        std::vector{Shard(0)});
  }
  options.session.signals = false;
  options.session.clip.max_norm = 1;
  options.max_epochs = 3;
  options.accumulate = 2;
  options.validate_every_steps = 2;
  options.log_every_steps = 2;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = true;
  options.checkpoint.options.timeout = std::chrono::seconds(20);
  const auto ema = std::make_shared<Ema>(0.8);
  options.callbacks = {ema,
                       std::make_shared<ReduceOnPlateau>(
                           "val/loss", 0.5, EarlyStoppingOptions{.patience = 1, .least = 0.05}),
                       std::make_shared<Timer>(std::chrono::hours(1)),
                       std::make_shared<Interrupt>(stop_at)};
  Trainer trainer(options);
  const FitResult result =
      trainer.fit(task, ragged_batches(manager.rank(), 5), ragged_batches(manager.rank() + 7, 2));
  Outcome outcome;
  outcome.values = task.values();
  for (const auto& [name, t] : ema->average()) outcome.average.push_back(whole(t).clone());
  outcome.metrics = result.metrics;
  outcome.steps = result.steps;
  outcome.epochs = result.epochs;
  if (stop_at > 0) {
    EXPECT_EQ(result.stop, Stop::terminated);
    // A validation (every second step, and at the end of an epoch) notices it before the next step,
    // is cut short, and comes again in the next run.
    const std::int64_t steps = stop_at % 2 == 0 || stop_at % 3 == 0 ? stop_at : stop_at + 1;
    EXPECT_EQ(result.steps, steps);
    EXPECT_EQ(result.checkpoint, concat("step-", steps));
  }
  return outcome;
}

void expect_same(const Outcome& got, const Outcome& expected, const std::string& what) {
  expect_equal(got.values, expected.values, what);
  expect_equal(got.average, expected.average, what + ", averages");
  EXPECT_EQ(got.metrics, expected.metrics) << what;
  EXPECT_EQ(got.steps, expected.steps) << what;
  EXPECT_EQ(got.epochs, expected.epochs) << what;
}

}  // namespace

TEST(ResumedTraining, InterruptedAfterEveryStepEqualsUninterrupted) {
  for (const Kind kind : {Kind::ddp, Kind::sharded}) {
    constexpr int kRanks = 2;
    std::vector<Outcome> expected(kRanks);
    const Folder none;
    on_threads(kRanks, [&](DistributedManager& manager) {
      expected[manager.rank()] = run(manager, kind, none / "full", 0);
    });
    EXPECT_EQ(expected[0].steps, 9);
    for (std::int64_t at = 1; at < 8; ++at) {
      const Folder folder;
      on_threads(kRanks,
                 [&](DistributedManager& manager) { run(manager, kind, folder.path(), at); });
      on_threads(kRanks, [&](DistributedManager& manager) {
        expect_same(run(manager, kind, folder.path(), 0), expected[manager.rank()],
                    concat(kind == Kind::ddp ? "ddp" : "sharded", ", interrupted at ", at + 1));
      });
    }
  }
}

TEST(ResumedTraining, InterruptedAgainAndAgain) {
  const Folder none, folder;
  on_threads(2, [&](DistributedManager& manager) {
    const Outcome expected = run(manager, Kind::sharded, none / "full", 0);
    for (std::int64_t at = 1; at < 8; at += 2) run(manager, Kind::sharded, folder.path(), at);
    expect_same(run(manager, Kind::sharded, folder.path(), 0), expected, "again and again");
  });
}

// Random numbers of libtorch's generator, which ranks as threads would share.
TEST(ResumedTraining, DropoutDrawsTheSameNumbers) {
  const Folder none;
  Outcome expected;
  on_threads(1, [&](DistributedManager& manager) {
    torch::manual_seed(5);
    expected = run(manager, Kind::ddp, none / "full", 0, true);
    for (std::int64_t at = 1; at < 8; ++at) {
      const Folder folder;
      torch::manual_seed(5);
      run(manager, Kind::ddp, folder.path(), at, true);
      torch::manual_seed(99);
      expect_same(run(manager, Kind::ddp, folder.path(), 0, true), expected,
                  concat("dropout, interrupted at ", at + 1));
    }
  });
}

// A region with numbers of its own disturbs nobody, whether it ends by itself or by an exception.
TEST(Generators, AreKeptSetAndForked) {
  on_threads(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    const ManualStrategy strategy(manager);
    const auto draw = [&] {
      return std::vector{
          at::rand({4}),
          full_tensor(at::rand_like(distribute_tensor(at::zeros({4}), mesh, {Shard(0)})))};
    };
    torch::manual_seed(4);
    manual_seed(manager, 4);
    const GeneratorState before = generator_state(strategy);
    const auto expected = draw();
    set_generator_state(strategy, before);
    std::vector<at::Tensor> first, again, forked;
    {
      const ForkedGenerators own(strategy, 9);
      first = draw();
    }
    EXPECT_EQ(generator_state(strategy), before);
    try {
      const ForkedGenerators own(strategy, 9);
      again = draw();
      throw Error("out of the region");
    } catch (const Error&) {
    }
    {
      const ForkedGenerators own(strategy);
      forked = draw();
    }
    const auto after = draw();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(after[i].equal(expected[i]));
      EXPECT_TRUE(forked[i].equal(expected[i]));
      EXPECT_TRUE(first[i].equal(again[i]));
      EXPECT_FALSE(first[i].equal(expected[i]));
    }
    GeneratorState cut = before;
    cut.local.resize(7);
    EXPECT_THROW(set_generator_state(strategy, cut), ConfigurationError);
  });
}

// Six shards of a dataset's samples, four each or fewer.
struct Sixth : StreamShards {
  explicit Sixth(std::shared_ptr<const Dataset> data) : data(std::move(data)) {}
  struct One : IterableDataset {
    One(const Dataset& data, std::uint64_t at, std::uint64_t end) : data(data), at(at), end(end) {}
    std::optional<Sample> next() override {
      if (at >= end) return std::nullopt;
      return data.get(at++);
    }
    const Dataset& data;
    std::uint64_t at, end;
  };
  std::uint64_t size() const override { return 6; }
  std::unique_ptr<IterableDataset> open(std::uint64_t shard, std::uint64_t from) const override {
    return std::make_unique<One>(*data, 4 * shard + from, std::min(4 * shard + 4, data->size()));
  }
  std::shared_ptr<const Dataset> data;
};

// On other ranks: the same samples, values to round-off. Each rank has its batches from a Loader,
// or from a stream of shards without end.
class ResumedOnOtherRanks : public ::testing::TestWithParam<bool> {};

TEST_P(ResumedOnOtherRanks, GoesOnWithTheSameSamples) {
  at::Generator own = at::detail::createCPUGenerator(2);
  const auto data = std::make_shared<TensorDataset>(std::vector<at::Tensor>{
      at::randn({23, 3}, own, at::kDouble), at::randn({23, 2}, own, at::kDouble)});
  const auto train = [&](DistributedManager& manager, const std::string& folder,
                         std::int64_t max_steps, bool sharded) {
    SampleOrderOptions order;
    order.samples = 23;
    order.seed = 4;
    const Mesh mesh({{"data", manager.world_size()}});
    Loader loader({data}, std::make_shared<FixedOrder>(order, BatchSchedule(6)),
                  batch_mapping(mesh, {"data"}), manager.rank(), {.workers = 1});
    StreamLoader stream(std::make_shared<Sixth>(data), {.lanes = 6, .seed = 4, .epochs = 0}, 6,
                        manager.world(), {.workers = 1});
    Regression task;
    TrainerOptions options;
    options.session.signals = false;
    if (sharded)
      options.strategy = std::make_shared<MeshStrategy>(
          manager.mesh({{"data", manager.world_size()}}),
          NamedPlacements{{"net.*.weight", {{Shard(0)}}}}, std::vector{Shard(0)});
    else
      options.strategy = std::make_shared<DDPStrategy>(manager);
    options.max_epochs = 3;
    options.max_steps = GetParam() && max_steps < 0 ? 12 : max_steps;
    options.checkpoint.folder = folder;
    options.checkpoint.resume = true;
    options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
    const FitResult result =
        Trainer(options).fit(task, GetParam() ? batches_of(stream) : batches_of(loader));
    EXPECT_EQ(result.steps, max_steps < 0 ? 12 : max_steps);
    return task.values();
  };
  std::vector<at::Tensor> expected;
  const Folder none;
  on_threads(
      1, [&](DistributedManager& manager) { expected = train(manager, none / "full", -1, false); });
  for (const int stop : {1, 4, 6}) {
    const Folder folder;
    on_threads(3, [&](DistributedManager& m) { train(m, folder.path(), stop, false); });
    on_threads(2, [&](DistributedManager& m) { train(m, folder.path(), stop + 2, true); });
    on_threads(4, [&](DistributedManager& m) {
      expect_near(train(m, folder.path(), -1, false), expected, concat("stopped at ", stop));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(FromShards, ResumedOnOtherRanks, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Yes" : "No"; });

TEST(ResumedTraining, ACheckpointOfAnotherShapeIsRefused) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto options = [&](bool more) {
      TrainerOptions all;
      all.strategy = std::make_shared<DDPStrategy>(manager);
      all.session.signals = false;
      all.checkpoint.folder = folder.path();
      all.checkpoint.resume = true;
      all.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
      if (more) all.callbacks.push_back(std::make_shared<Ema>(0.5));
      return all;
    };
    Regression task, other(torch::nn::Sequential(torch::nn::Linear(3, 2)));
    Trainer(options(false)).fit(task, ragged_batches(manager.rank(), 2));
    // The first rank that throws ends the others' calls.
    EXPECT_THROW(Trainer(options(false)).fit(other, ragged_batches(manager.rank(), 2)), Error);
  });
  on_threads(2, [&](DistributedManager& manager) {
    TrainerOptions all;
    all.strategy = std::make_shared<DDPStrategy>(manager);
    all.session.signals = false;
    all.checkpoint.folder = folder.path();
    all.checkpoint.from = "not-there";
    Regression task;
    EXPECT_THROW(Trainer(all).fit(task, ragged_batches(manager.rank(), 2)), Error);
  });
}

}  // namespace tessera::test
