// A pipeline through the trainer: gradients of several batches, clipping over stages, metrics, and
// checkpoints that other pipelines and one process go on from.

#include <ATen/autocast_mode.h>

#include <cmath>

#include "../support/meta.h"
#include "cases.h"
#include "tessera/nn/deferred.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/generators.h"
#include "tessera/train/pipeline_strategy.h"

namespace tessera::test {

namespace {

// The regression's network in two stages, of which this rank has one.
struct Part : Task {
  Part(std::shared_ptr<PipelineStrategy> s, int stage,
       const torch::nn::Sequential& net = small_net())
      : strategy(std::move(s)),
        part(split_sequential(net, std::vector<int>{2})[static_cast<std::size_t>(stage)]) {}
  NamedModules modules() override { return {{"net", part.ptr()}}; }
  Optimizers optimizers() override {
    const auto stage =
        make_stage(part.ptr(), [this](const std::vector<at::Tensor>& x) -> std::vector<at::Tensor> {
          at::Tensor y = part->forward(x[0]);
          cast = y.scalar_type();
          return {y};
        });
    pipeline = strategy->make_pipeline(
        schedule_1f1b(2, 3), {stage},
        [](const auto& out, const auto& target) { return torch::mse_loss(out[0], target[0]); });
    return {
        std::make_shared<torch::optim::Adam>(part->parameters(), torch::optim::AdamOptions(0.05))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    return run_pipeline(*pipeline, strategy->split(batch, 1, 3), step);
  }
  void validation_step(const MicroBatch& batch, Step& step) override {
    evaluate_pipeline(*pipeline, strategy->split(batch, 1, 3), step);
    step.log("rows", static_cast<double>(batch.real), Metrics::Kind::sum);
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& p : part->parameters()) all.push_back(whole(p).clone());
    return all;
  }
  std::shared_ptr<PipelineStrategy> strategy;
  torch::nn::Sequential part;
  std::shared_ptr<Pipeline> pipeline;
  at::ScalarType cast = at::kDouble;
};

struct SaveEachEpoch : Callback {
  std::string name() const override { return "save"; }
  void on_epoch_end(Trainer& trainer) override { trainer.request_save(); }
};

constexpr std::int64_t kOfAnEpoch = 5;

struct Ends {
  /// Of this rank, in a pipeline.
  int stage = 0;
  std::vector<at::Tensor> values;
  std::map<std::string, double> metrics;
};

// Two stages x `data` ranks.
Ends run_part(DistributedManager& manager, int data, TrainerOptions options,
              const torch::nn::Sequential& net = small_net()) {
  std::vector<Axis> axes{{"pipe", 2}};
  if (data > 0) axes.push_back({"data", data});
  const auto mesh = manager.mesh(mapped(axes));
  const auto strategy = data > 0 ? std::make_shared<PipelineStrategy>(mesh, "pipe", Parallelise(),
                                                                      std::vector{Shard(0)})
                                 : std::make_shared<PipelineStrategy>(mesh, "pipe");
  Part task(strategy, mesh.coordinate()[0], net);
  const int reader = data > 0 ? mesh.coordinate()[1] : 0;
  options.strategy = strategy;
  const FitResult result =
      Trainer(options).fit(task, ragged_batches(reader, kOfAnEpoch), ragged_batches(reader, 3));
  return {mesh.coordinate()[0], task.values(), result.metrics};
}

Ends run_alone(int data, int accumulate, TrainerOptions options) {
  Regression task;
  options.strategy = nullptr;
  options.accumulate = 1;
  const FitResult result = Trainer(options).fit(task, joined_batches(data, kOfAnEpoch, accumulate),
                                                joined_batches(data, 3, 1));
  return {0, task.values(), result.metrics};
}

// Those of this rank's stage.
void expect_part(const Ends& got, const Ends& expected, const std::string& what) {
  const auto begin = expected.values.begin() + 2 * got.stage;
  expect_near(got.values, {begin, begin + 2}, what);
  for (const char* name : {"val/loss", "val/rows", "train/loss"})
    EXPECT_NEAR(got.metrics.at(name), expected.metrics.at(name), 1e-10) << what << ", " << name;
}

}  // namespace

TEST(TrainedPipeline, TrainsAsOneProcessDoes) {
  for (const int data : {0, 1, 2}) {
    for (const int accumulate : {1, 3}) {
      const Ends expected = run_alone(std::max(data, 1), accumulate, with(nullptr, 1));
      on_threads(2 * std::max(data, 1), [&](DistributedManager& manager) {
        const Ends got = run_part(manager, data, with(nullptr, accumulate));
        expect_part(got, expected, concat("data ", data, ", accumulate ", accumulate));
      });
    }
  }
}

// Each rank makes the model in no memory, and the strategy fills its stage.
TEST(TrainedPipeline, DeferredStagesTrainAsOneProcessDoes) {
  for (const int data : {0, 2}) {
    const Ends expected = run_alone(std::max(data, 1), 1, with(nullptr, 1));
    on_threads(2 * std::max(data, 1), [&](DistributedManager& manager) {
      for (const bool meta : {false, true}) {
        torch::nn::Sequential net = small_net();
        if (!meta)
          net = deferred([] {
            return torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::Tanh(),
                                         torch::nn::Linear(5, 2));
          });
        else
          to_meta(*net);
        if (meta) defer(*net);
        net->to(at::kDouble);
        fill(*net, 11);
        const Ends got = run_part(manager, data, with(nullptr, 1), net);
        expect_part(got, expected, concat("data ", data, ", meta ", meta));
        EXPECT_TRUE(is_deferred(net->parameters()[got.stage == 0 ? 2 : 0]));
      }
    });
  }
}

TEST(TrainedPipeline, GoesOnOnOtherRanksAndOnOne) {
  const Ends expected = run_alone(2, 1, with(nullptr, 1));
  const auto options = [&](const std::string& folder, int epochs) {
    TrainerOptions o = with(nullptr, 1);
    o.max_epochs = epochs;
    o.checkpoint.folder = folder;
    o.checkpoint.resume = true;
    o.callbacks = {std::make_shared<SaveEachEpoch>()};
    return o;
  };
  // From a pipeline to one process.
  const Folder there;
  on_threads(4, [&](DistributedManager& m) { run_part(m, 2, options(there.path(), 1)); });
  const Ends alone = run_alone(2, 1, options(there.path(), 2));
  expect_near(alone.values, expected.values, "from a pipeline to one process");
  // And back.
  const Folder back;
  run_alone(2, 1, options(back.path(), 1));
  on_threads(4, [&](DistributedManager& m) {
    expect_part(run_part(m, 2, options(back.path(), 2)), expected,
                "from one process to a pipeline");
  });
  // A checkpoint of another model is refused by all, though each has a part of it.
  on_threads(2, [&](DistributedManager& m) {
    const auto mesh = m.mesh({{"pipe", 2}});
    const auto strategy = std::make_shared<PipelineStrategy>(mesh, "pipe");
    Part task(strategy, 0);  // nobody has the second stage
    TrainerOptions o = options(back.path(), 3);
    o.strategy = strategy;
    EXPECT_THROW(Trainer(o).fit(task, ragged_batches(0, kOfAnEpoch)), InvalidArgument);
  });
}

TEST(TrainedPipeline, RefusesStepsOfTwoKinds) {
  auto strategy = std::make_shared<SingleDevice>();
  auto net = small_net();
  Session session(strategy, {{"net", net.ptr()}}, {.signals = false});
  session.add(std::make_shared<torch::optim::SGD>(net->parameters(), 0.1));
  const auto loss = [&] { return net->forward(at::ones({2, 3}, at::kDouble)).mean(); };
  const auto added = [&](double divisor) {
    (loss() * (2 / divisor)).backward();
    return TotalLoss{loss().item<double>(), 2};
  };
  session.micro_batch(loss, 2);
  EXPECT_THROW(session.add_gradients(added), InvalidArgument);
  session.step();
  // Two halves make one whole.
  auto other = small_net();
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 4; ++i) other->parameters()[i].copy_(net->parameters()[i]);
  }
  session.add_gradients(added, false);
  EXPECT_THROW(session.micro_batch(loss, 2), InvalidArgument);
  session.add_gradients(added);
  const double before = loss().item<double>();
  const StepResult done = session.step();
  EXPECT_NEAR(done.loss, before, 1e-14);
  EXPECT_EQ(done.weight, 4);
  other->forward(at::ones({2, 3}, at::kDouble)).mean().backward();
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_LT(difference(net->parameters()[i],
                         other->parameters()[i].detach() - 0.1 * other->parameters()[i].grad()),
              1e-13);
}

TEST(TrainedPipeline, AnErrorForgetsTheStepThatItEnds) {
  auto net = small_net(), twin = small_net();
  Session session(std::make_shared<SingleDevice>(), {{"net", net.ptr()}}, {.signals = false});
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 4; ++i) twin->parameters()[i].copy_(net->parameters()[i]);
  }
  session.add(std::make_shared<torch::optim::SGD>(net->parameters(), 0.1));
  torch::optim::SGD expected(twin->parameters(), 0.1);
  const auto loss_of = [](torch::nn::Sequential& of) {
    return of->forward(at::ones({2, 3}, at::kDouble)).mean();
  };
  const auto loss = [&] { return loss_of(net); };
  const auto throws = [&] {
    const at::Tensor value = loss();
    value.register_hook([](const at::Tensor&) -> at::Tensor { throw std::domain_error("hook"); });
    return value;
  };
  const auto added = [&](double divisor) {
    (loss() * (2 / divisor)).backward();
    return TotalLoss{loss().item<double>(), 2};
  };
  const auto half_added = [&](double divisor) {
    added(divisor);
    throw std::domain_error("a stage");
    return TotalLoss{};
  };
  const auto expect_one_step = [&](const char* where) {
    expected.zero_grad();
    const at::Tensor wanted = loss_of(twin);
    wanted.backward();
    expected.step();
    const StepResult done = session.step();
    EXPECT_NEAR(done.loss, wanted.item<double>(), 1e-14) << where;
    EXPECT_EQ(done.weight, 2) << where;
    for (std::size_t i = 0; i < 4; ++i)
      EXPECT_LT(difference(net->parameters()[i], twin->parameters()[i]), 1e-13) << where;
  };
  for (const char* where : {"before any step", "after one"}) {
    // A micro-batch is there already; what comes next may be of the other kind.
    session.micro_batch(loss, 5, /*last=*/false);
    EXPECT_THROW(session.micro_batch(throws, 2), std::domain_error) << where;
    session.add_gradients(added);
    expect_one_step(where);
    session.add_gradients(added, false);
    EXPECT_THROW(session.add_gradients(half_added), std::domain_error) << where;
    session.micro_batch(loss, 2);
    expect_one_step(where);
    // A loss that is refused has changed nothing.
    session.micro_batch(loss, 1, /*last=*/false);
    EXPECT_THROW(session.micro_batch([&] { return loss().expand({2}); }, 1), InvalidArgument);
    session.micro_batch(loss, 1);
    expect_one_step(where);
    session.micro_batch(loss, 2);
    EXPECT_THROW(session.step({}, [](const StepResult&) { throw std::domain_error("before"); }),
                 std::domain_error);
    session.micro_batch(loss, 2);
    expect_one_step(where);
  }
}

TEST(TrainedPipeline, NeedsTheLossOnEveryRank) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}});
    PipelineStrategy strategy(mesh, "pipe");
    const auto part = split_sequential(
        small_net(), std::vector<int>{2})[static_cast<std::size_t>(manager.rank())];
    const auto squared = [](const auto& out, const auto& target) {
      return torch::mse_loss(out[0], target[0]);
    };
    PipelineOptions options;
    options.loss_everywhere = false;
    EXPECT_THROW(strategy.make_pipeline(schedule_1f1b(2, 3), {make_stage(part)}, squared, options),
                 InvalidArgument);
    options.loss_everywhere = true;
    EXPECT_NE(strategy.make_pipeline(schedule_1f1b(2, 3), {make_stage(part)}, squared, options),
              nullptr);
  });
}

struct FirstNorm : Callback {
  std::string name() const override { return "norm"; }
  void on_step_end(Trainer&, const StepResult& step) override {
    if (!std::isfinite(norm) && std::isfinite(step.norm)) norm = step.norm;
  }
  double norm = std::nan("");
};

// Forwards are cast, on every stage, and nothing else; the scale of float16 is in the gradients and
// out of them again.
TEST(TrainedPipeline, CastsItsForwards) {
  const auto batches = [] {
    return batches_of([](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
      if (index >= 3) return std::nullopt;
      const auto data = ragged_data(0, static_cast<std::int64_t>(3 * epoch + index));
      return make_batch({data[0].to(at::kFloat), data[1].to(at::kFloat)});
    });
  };
  for (const Precision precision : {Precision::bfloat16_mixed, Precision::float16_mixed}) {
    const auto run = [&](Task& task, std::shared_ptr<Strategy> strategy) {
      TrainerOptions options = with(std::move(strategy), 1);
      options.session.precision = precision;
      options.session.scaler.initial = 1024;
      const auto norm = std::make_shared<FirstNorm>();
      options.callbacks = {norm};
      Trainer(options).fit(task, batches());
      return norm->norm;
    };
    Regression single;
    single.net->to(at::kFloat);
    const double expected = run(single, nullptr);
    EXPECT_GT(expected, 0);
    on_threads(2, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"pipe", 2}});
      const auto strategy = std::make_shared<PipelineStrategy>(mesh, "pipe");
      Part task(strategy, manager.rank());
      task.part->to(at::kFloat);
      EXPECT_NEAR(run(task, strategy), expected, 0.03 * expected);
      EXPECT_EQ(task.cast, precision == Precision::bfloat16_mixed ? at::kBFloat16 : at::kHalf);
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    });
  }
}

}  // namespace tessera::test
