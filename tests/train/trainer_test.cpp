// The trainer's loop: the order of calls, precision, several optimizers, manual optimisation,
// evaluation, and what goes wrong on one rank.

#include <ATen/autocast_mode.h>

#include <cmath>
#include <mutex>

#include "support.h"

namespace tessera::test {

namespace {

// Writes down what is called.
class Diary : public Callback {
 public:
  std::string name() const override { return "diary"; }
  void on_setup(Trainer&) override { add("setup"); }
  void on_fit_start(Trainer&) override { add("fit"); }
  void on_epoch_start(Trainer&) override { add("epoch"); }
  void on_batch_start(Trainer&, const MicroBatch&) override { add("batch"); }
  void on_before_backward(Trainer&, const at::Tensor&) override { add("backward"); }
  void on_after_backward(Trainer&) override { add("/backward"); }
  void on_before_step(Trainer&, const StepResult&) override { add("step"); }
  void on_batch_end(Trainer&, const MicroBatch&) override { add("/batch"); }
  void on_step_end(Trainer&, const StepResult&) override { add("/step"); }
  void on_validation_start(Trainer&) override { add("validation"); }
  void on_validation_end(Trainer&, bool complete) override {
    add(complete ? "/validation" : "/validation cut short");
  }
  void on_epoch_end(Trainer&) override { add("/epoch"); }
  void on_fit_end(Trainer&) override { add("/fit"); }
  void on_exception(Trainer&, const std::exception& e) override {
    add("exception");
    what = e.what();
  }
  std::string text, what;

 private:
  void add(const std::string& word) { text += word + " "; }
};

TrainerOptions quiet(std::shared_ptr<Strategy> strategy = nullptr) {
  TrainerOptions options;
  options.strategy = std::move(strategy);
  options.session.signals = false;
  return options;
}

}  // namespace

TEST(Trainer, CallsCallbacksInTheirOrder) {
  Regression task;
  auto options = quiet();
  const auto diary = std::make_shared<Diary>();
  options.callbacks = {diary};
  options.accumulate = 2;
  Trainer(options).fit(task, ragged_batches(0, 3), ragged_batches(0, 1));
  const std::string micro = "batch backward /backward /batch ";
  EXPECT_EQ(diary->text, "setup fit epoch " + micro + micro + "step /step " + micro +
                             "step /step validation /validation /epoch /fit ");
}

TEST(Trainer, LimitsAndIntervals) {
  for (const std::int64_t steps : {0, 1, 4, 5, 6}) {
    Regression task;
    auto options = quiet();
    const auto diary = std::make_shared<Diary>();
    options.callbacks = {diary};
    options.max_epochs = 2;
    options.max_steps = steps;
    options.validate_every_epochs = 0;
    options.validate_every_steps = 2;
    const FitResult result = Trainer(options).fit(task, ragged_batches(0, 3), ragged_batches(0, 1));
    EXPECT_EQ(result.steps, std::min<std::int64_t>(steps, 6));
    EXPECT_EQ(result.stop, Stop::none);
    std::int64_t validations = 0;
    for (std::size_t at = 0; (at = diary->text.find("/validation", at)) != std::string::npos; ++at)
      ++validations;
    EXPECT_EQ(validations, std::min<std::int64_t>(steps, 6) / 2);
  }
  EXPECT_THROW(Trainer(TrainerOptions{.accumulate = 0}), InvalidArgument);
  EXPECT_THROW(Trainer(TrainerOptions{.checkpoint = {.resume = true}}), InvalidArgument);
  EXPECT_THROW(
      Trainer(TrainerOptions{.callbacks = {std::make_shared<Diary>(), std::make_shared<Diary>()}}),
      InvalidArgument);
}

TEST(Trainer, ClipsByValueAndByNorm) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Regression task;
      auto options = quiet(std::make_shared<DDPStrategy>(manager));
      options.session.clip_value = 1e-3;
      options.session.measure_norm = true;
      struct Look : Callback {
        std::string name() const override { return "look"; }
        void on_before_step(Trainer& trainer, const StepResult& result) override {
          EXPECT_TRUE(std::isfinite(result.norm));
          for (const auto& p : trainer.session().modules()[0].module->parameters())
            EXPECT_LE(p.grad().abs().max().item<double>(), 1e-3);
          ++steps;
        }
        int steps = 0;
      };
      const auto look = std::make_shared<Look>();
      options.callbacks = {look};
      Trainer(options).fit(task, ragged_batches(manager.rank(), 3));
      EXPECT_EQ(look->steps, 3);
    });
  }
}

// ---- precision ----

namespace {

// A network in float32, with a loss that overflows on one rank at some steps.
class Halves : public Task {
 public:
  Halves(int rank, int overflows_on) : rank_(rank), overflows_on_(overflows_on) {
    seed(8);
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : net->parameters()) p.copy_(randn(p.sizes()) * 0.3);
  }
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::SGD>(net->parameters(), 0.1)};
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    const at::Tensor made = net->forward(batch.tensors[0]);
    dtypes.push_back(made.scalar_type());
    at::Tensor loss = torch::mse_loss(made.to(batch.tensors[1].scalar_type()), batch.tensors[1]);
    if (rank_ == overflows_on_ && step.step() == 2) loss = loss * INFINITY;
    return loss;
  }
  torch::nn::Linear net{torch::nn::LinearOptions(3, 2)};
  std::vector<at::ScalarType> dtypes;

 private:
  int rank_, overflows_on_;
};

std::shared_ptr<BatchSource> singles(int rank) {
  return batches_of([rank](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
    if (i >= 6) return std::nullopt;
    at::Generator own =
        at::detail::createCPUGenerator(40 + static_cast<std::uint64_t>(rank) * 10 + i);
    return make_batch({at::randn({4, 3}, own), at::randn({4, 2}, own)});
  });
}

struct Scales : Callback {
  std::string name() const override { return "scales"; }
  void on_step_end(Trainer& trainer, const StepResult& result) override {
    stepped.push_back(result.stepped);
    scale.push_back(trainer.session().loss_scale());
  }
  std::vector<bool> stepped;
  std::vector<double> scale;
};

}  // namespace

TEST(Precision, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Halves task(manager.rank(), ranks - 1);
      auto options = quiet(std::make_shared<DDPStrategy>(manager));
      options.session.precision = Precision::float16_mixed;
      options.session.scaler.initial = 1024;
      options.session.scaler.interval = 2;
      const auto scales = std::make_shared<Scales>();
      options.callbacks = {scales};
      Trainer(options).fit(task, singles(manager.rank()));
      EXPECT_EQ(scales->stepped, (std::vector<bool>{true, true, false, true, true, true}));
      EXPECT_EQ(scales->scale, (std::vector<double>{1024, 2048, 1024, 1024, 2048, 2048}));
      EXPECT_EQ(task.dtypes[0], at::kHalf);
      EXPECT_TRUE(at::isfinite(task.net->weight).all().item<bool>());
      // The same parameters everywhere, and near those of float32.
      at::Tensor first = task.net->weight.detach().clone();
      manager.world().broadcast(first, 0);
      EXPECT_TRUE(first.equal(task.net->weight.detach()));
    });
  }
}

TEST(Precision, MixedIsNearFullAndConversionsConvert) {
  std::vector<at::Tensor> weights;
  for (const Precision precision : {Precision::as_is, Precision::bfloat16_mixed,
                                    Precision::float16_mixed, Precision::float64}) {
    Halves task(0, -1);
    auto options = quiet();
    options.session.precision = precision;
    options.session.scaler.initial = 1024;  // no step is left out
    Trainer(options).fit(task, singles(0));
    EXPECT_EQ(task.dtypes[0], precision == Precision::as_is            ? at::kFloat
                              : precision == Precision::bfloat16_mixed ? at::kBFloat16
                              : precision == Precision::float16_mixed  ? at::kHalf
                                                                       : at::kDouble);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    weights.push_back(task.net->weight.detach().to(at::kDouble));
  }
  EXPECT_LT(difference(weights[1], weights[0]), 2e-2);
  EXPECT_LT(difference(weights[2], weights[0]), 3e-3);
  EXPECT_LT(difference(weights[3], weights[0]), 1e-5);
  EXPECT_THROW(
      {
        LossScaler scaler({.initial = 1, .smallest = 0.5});
        scaler.update(true);
        scaler.update(true);
      },
      Error);
  LossScaler scaler, other;
  scaler.update(true);
  other.restore(scaler.state());
  EXPECT_EQ(other.scale(), 32768);
  EXPECT_THROW(other.restore("0x1p+3"), ConfigurationError);
}

// ---- several optimizers ----

namespace {

// Two networks that train against each other, by hand.
class Duel : public Task {
 public:
  Duel() {
    left->to(at::kDouble), right->to(at::kDouble);
    fill(*left, 1);
    fill(*right, 2);
  }
  NamedModules modules() override { return {{"left", left.ptr()}, {"right", right.ptr()}}; }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::SGD>(left->parameters(), 0.1),
            std::make_shared<torch::optim::SGD>(right->parameters(), 0.05)};
  }
  bool automatic() const override { return false; }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    Session& session = step.session();
    const double rows = static_cast<double>(batch.real);
    const at::Tensor& x = batch.tensors[0];
    const auto off = [&] { return (right->forward(left->forward(x)) - x).square().mean(); };
    session.backward(off(), rows);
    session.step({0});
    session.backward(-off(), rows);
    session.step({1});
    return {};
  }
  std::vector<at::Tensor> values() {
    std::vector<at::Tensor> all;
    for (const auto& p : left->parameters()) all.push_back(p.detach().clone());
    for (const auto& p : right->parameters()) all.push_back(p.detach().clone());
    return all;
  }
  torch::nn::Linear left{3, 2}, right{2, 3};
};

}  // namespace

TEST(Trainer, ManualOptimisationOfTwoOptimizersOnAnyRanks) {
  std::vector<at::Tensor> expected;
  for (int ranks = 1; ranks <= 3; ++ranks) {
    Duel reference;
    Trainer(quiet()).fit(reference, joined_batches(ranks, 4, 1));
    // The definition, without a trainer.
    Duel plain;
    torch::optim::SGD a(plain.left->parameters(), 0.1), b(plain.right->parameters(), 0.05);
    const auto source = joined_batches(ranks, 4, 1);
    source->start_epoch(0);
    while (const auto batch = source->next()) {
      const auto& x = batch->tensors[0];
      const auto off = [&] {
        return (plain.right->forward(plain.left->forward(x)) - x).square().mean();
      };
      a.zero_grad(), b.zero_grad();
      off().backward();
      a.step();
      a.zero_grad(), b.zero_grad();
      (-off()).backward();
      b.step();
    }
    expect_near(reference.values(), plain.values(), "one process");
    on_threads(ranks, [&](DistributedManager& manager) {
      Duel task;
      const FitResult result = Trainer(quiet(std::make_shared<DDPStrategy>(manager)))
                                   .fit(task, ragged_batches(manager.rank(), 4));
      EXPECT_EQ(result.steps, 8);
      expect_near(task.values(), reference.values(), concat(ranks, " ranks"));
    });
  }
}

TEST(Trainer, SchedulesAndSeveralOptimizersStepTogether) {
  class Two : public Duel {
   public:
    bool automatic() const override { return true; }
    at::Tensor training_step(const MicroBatch& batch, Step&) override {
      return (right->forward(left->forward(batch.tensors[0])) - batch.tensors[0]).square().mean();
    }
    std::vector<LearningRateSchedule> schedules() override {
      return {{[](std::int64_t step, std::int64_t) { return 1.0 / (1.0 + step); }, 0},
              {step_decay(1, 0.5), 1}};
    }
  };
  Two task;
  auto options = quiet();
  options.max_epochs = 2;
  struct Rates : Callback {
    std::string name() const override { return "rates"; }
    void on_before_step(Trainer& trainer, const StepResult&) override {
      for (const auto& o : trainer.session().optimizers())
        rates.push_back(o->param_groups()[0].options().get_lr());
    }
    std::vector<double> rates;
  };
  const auto rates = std::make_shared<Rates>();
  options.callbacks = {rates};
  Trainer(options).fit(task, ragged_batches(0, 2));
  const std::vector<double> expected{0.1, 0.05, 0.1 / 2, 0.05, 0.1 / 3, 0.025, 0.1 / 4, 0.025};
  ASSERT_EQ(rates->rates.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(rates->rates[i], expected[i], 1e-15);
  const auto warm = warmup_cosine(2, 6, 0.1);
  EXPECT_NEAR(warm(0, 0), 0.5, 1e-15);
  EXPECT_NEAR(warm(2, 0), 1, 1e-15);
  EXPECT_NEAR(warm(4, 0), 0.55, 1e-15);
  EXPECT_NEAR(warm(9, 0), 0.1, 1e-15);
}

// ---- evaluation ----

TEST(Trainer, ValidatesTestsAndPredictsAsOneProcess) {
  std::map<std::string, double> expected;
  at::Tensor made;
  {
    Regression task;
    Trainer trainer(quiet());
    trainer.fit(task, joined_batches(3, 2, 1));
    expected = trainer.test(task, joined_batches(3, 4, 1));
    EXPECT_EQ(trainer.validate(task, joined_batches(3, 4, 1)).at("val/loss"),
              expected.at("test/loss"));
    std::vector<at::Tensor> all;
    for (const auto& one : trainer.predict(task, joined_batches(3, 4, 1))) all.push_back(one[0]);
    made = at::cat(all);
  }
  on_threads(3, [&](DistributedManager& manager) {
    Regression task;
    Trainer trainer(quiet(std::make_shared<DDPStrategy>(manager)));
    trainer.fit(task, ragged_batches(manager.rank(), 2));
    const auto got = trainer.test(task, ragged_batches(manager.rank(), 4));
    EXPECT_NEAR(got.at("test/loss"), expected.at("test/loss"), 1e-10);
    EXPECT_EQ(got.at("test/rows"), expected.at("test/rows"));
    EXPECT_TRUE(task.net->is_training());
    task.net->ptr(1)->eval();  // a part that the user keeps so
    trainer.validate(task, ragged_batches(manager.rank(), 1));
    EXPECT_TRUE(task.net->ptr(0)->is_training());
    EXPECT_FALSE(task.net->ptr(1)->is_training());
    double sum = 0;
    for (const auto& one : trainer.predict(task, ragged_batches(manager.rank(), 4))) {
      EXPECT_FALSE(one[0].requires_grad());
      sum += one[0].sum().item<double>();
    }
    at::Tensor total = at::full({1}, sum, at::kDouble);
    manager.world().all_reduce(total);
    EXPECT_NEAR(total.item<double>(), made.sum().item<double>(), 1e-10);
  });
}

TEST(Metrics, WeightedOverRanksWithOtherNames) {
  on_threads(4, [](DistributedManager& manager) {
    const int me = manager.rank();
    ManualStrategy strategy(manager, {.sharing = 2});
    Metrics metrics;
    metrics.add("mean", me + 1.0, me);  // rank 0 has weight 0
    metrics.add("nothing", std::nan(""), 0.0);
    metrics.add("sum", 3, Metrics::Kind::sum);
    metrics.add("max", me == 2 ? 9 : me, Metrics::Kind::max);
    if (me == 1) metrics.add("only", 5);
    Metrics copy;
    copy.restore(metrics.state());
    for (const Metrics* one : {&metrics, &copy}) {
      const auto all = one->reduce(strategy);
      EXPECT_EQ(all.size(), 4u);
      EXPECT_NEAR(all.at("mean"), (2.0 + 2 * 3 + 3 * 4) / 6, 1e-15);
      EXPECT_EQ(all.at("sum"), 6);  // two ranks share each sample
      EXPECT_EQ(all.at("max"), 9);
      EXPECT_EQ(all.at("only"), 5);
    }
    EXPECT_THROW(metrics.add("sum", 1.0), InvalidArgument);
    EXPECT_THROW(metrics.add("mean", 1.0, -1.0), InvalidArgument);
    EXPECT_THROW(copy.restore(metrics.state() + "x"), ConfigurationError);
  });
}

TEST(Strategies, ReduceOverAGroupWithAnOperator) {
  on_threads(4, [](DistributedManager& manager) {
    const int me = manager.rank();
    const Group pair = manager.group(me % 2 == 0 ? std::vector{0, 2} : std::vector{3, 1});
    for (const std::shared_ptr<Strategy>& strategy :
         {std::shared_ptr<Strategy>(std::make_shared<ManualStrategy>(manager)),
          std::shared_ptr<Strategy>(std::make_shared<DDPStrategy>(manager))}) {
      const at::Tensor largest = at::full({2}, me, at::kDouble), sum = largest.clone();
      strategy->reduce(largest, ReduceOp::max, pair);
      EXPECT_EQ(largest[1].item<double>(), me % 2 == 0 ? 2 : 3);
      strategy->reduce(sum, ReduceOp::sum);
      EXPECT_EQ(sum[0].item<double>(), 6);
    }
  });
}

// ---- what goes wrong ----

TEST(Trainer, AnExceptionOnOneRankEndsAllWithItsMessageInEveryPhase) {
  for (const std::string phase : {"forward", "backward", "step", "validation", "data"}) {
    std::mutex mutex;
    std::vector<std::string> heard;
    try {
      on_threads(3, [&](DistributedManager& manager) {
        struct Bomb : Diary {
          Bomb(std::string where, bool on) : where(std::move(where)), on(on) {}
          void explode(const char* here, Trainer& trainer) {
            if (on && where == here && trainer.step() >= 1) throw Error("the bomb in " + where);
          }
          void on_batch_start(Trainer& t, const MicroBatch&) override { explode("forward", t); }
          void on_after_backward(Trainer& t) override { explode("backward", t); }
          void on_before_step(Trainer& t, const StepResult&) override { explode("step", t); }
          void on_validation_start(Trainer& t) override { explode("validation", t); }
          std::string where;
          bool on;
        };
        Regression task;
        auto options = quiet(std::make_shared<DDPStrategy>(manager));
        const auto bomb = std::make_shared<Bomb>(phase, manager.rank() == 1);
        options.callbacks = {bomb};
        options.max_epochs = 2;
        const bool data = phase == "data" && manager.rank() == 1;
        const auto source =
            batches_of([&](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
              if (data && i == 2) throw Error("the bomb in data");
              if (i >= 3) return std::nullopt;
              return make_batch(ragged_data(manager.rank(), static_cast<std::int64_t>(i)));
            });
        const auto began = std::chrono::steady_clock::now();
        try {
          Trainer(options).fit(task, source, ragged_batches(manager.rank(), 2));
          ADD_FAILURE() << "nothing was thrown in " << phase;
        } catch (const std::exception& e) {
          EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15));
          EXPECT_NE(bomb->text.find("exception"), std::string::npos);
          const std::lock_guard lock(mutex);
          heard.push_back(e.what());
          throw;
        }
      });
      ADD_FAILURE() << "nothing was thrown in " << phase;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("the bomb in " + phase), std::string::npos) << e.what();
    }
    ASSERT_EQ(heard.size(), 3u);
    for (const std::string& what : heard)
      EXPECT_NE(what.find("the bomb in " + phase), std::string::npos) << what;
  }
}

TEST(Session, RefusesWhatItCannotDo) {
  const auto one = std::make_shared<SingleDevice>();
  auto net = small_net();
  EXPECT_THROW(Session(nullptr, {{"net", net.ptr()}}), InvalidArgument);
  EXPECT_THROW(Session(one, {{"train", net.ptr()}}), InvalidArgument);
  EXPECT_THROW(Session(one, {{"net", net.ptr()}}, {.clip_value = 0}), InvalidArgument);
  Session session(one, {{"net", net.ptr()}}, {.signals = false});
  EXPECT_THROW(session.step(), InvalidArgument);
  session.add(std::make_shared<torch::optim::SGD>(net->parameters(), 0.1));
  EXPECT_THROW(session.step({4}), InvalidArgument);
  // Weights that are nothing: an error, and the next step is right.
  const auto x = at::ones({2, 3}, at::kDouble);
  session.micro_batch([&] { return net->forward(x).sum(); }, 0);
  EXPECT_THROW(session.step(), InvalidArgument);
  session.micro_batch([&] { return net->forward(x).sum(); }, -1);
  EXPECT_THROW(session.step(), InvalidArgument);
  const auto before = net->parameters()[0].detach().clone();
  session.micro_batch([&] { return net->forward(x).sum(); }, 2);
  const StepResult result = session.step();
  EXPECT_TRUE(result.stepped);
  EXPECT_EQ(result.weight, 2);
  EXPECT_FALSE(net->parameters()[0].detach().equal(before));
  EXPECT_FALSE(net->parameters()[0].grad().defined());
}

}  // namespace tessera::test
