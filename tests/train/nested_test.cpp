// Runs inside runs: the same task may be evaluated, anything else over one strategy is refused, and
// the run outside goes on as if nothing had been.

#include "cases.h"
#include "trouble.h"

namespace tessera::test {

namespace {

// Calls something once, after the second step.
struct Within : Callback {
  explicit Within(std::function<void(Trainer&)> what) : call(std::move(what)) {}
  std::string name() const override { return "within"; }
  void on_step_end(Trainer& trainer, const StepResult&) override {
    if (trainer.step() == 2) call(trainer);
  }
  std::function<void(Trainer&)> call;
};

std::vector<at::Tensor> around(DistributedManager& manager, std::shared_ptr<Strategy> strategy,
                               const std::function<void(Trainer&)>& inside) {
  Regression task;
  auto options = with(std::move(strategy), 2);
  if (inside) options.callbacks = {std::make_shared<Within>(inside)};
  Trainer(options).fit(task, ragged_batches(manager.rank(), 5));
  return task.values();
}

}  // namespace

TEST(Nested, ARunOverAStrategyInUseIsRefusedAndTheOuterOneGoesOn) {
  on_threads(2, [](DistributedManager& manager) {
    const auto make = [&](int kind) -> std::shared_ptr<Strategy> {
      if (kind == 0) return std::make_shared<DDPStrategy>(manager);
      if (kind == 1) return std::make_shared<Mine>(manager.world());
      return std::make_shared<ProcessGroupStrategy>(manager.world().process_group());
    };
    for (int kind = 0; kind < 3; ++kind) {
      const auto expected = around(manager, make(kind), {});
      const auto strategy = make(kind);
      int refused = 0;
      const auto got = around(manager, strategy, [&](Trainer& outer) {
        Regression other;
        const auto source = ragged_batches(manager.rank(), 2);
        EXPECT_THROW(Trainer(with(strategy, 1)).fit(other, source), InvalidArgument);
        EXPECT_THROW(Trainer(with(strategy, 1)).validate(other, source), InvalidArgument);
        EXPECT_THROW(Session(strategy, other.modules(), {.signals = false}), InvalidArgument);
        EXPECT_THROW(outer.fit(other, source), InvalidArgument);
        EXPECT_THROW(outer.fit(outer.task(), source), InvalidArgument);
        EXPECT_THROW(outer.validate(other, source), InvalidArgument);
        EXPECT_THROW(outer.test(other, source), InvalidArgument);
        EXPECT_THROW(outer.predict(other, source), InvalidArgument);
        ++refused;
      });
      EXPECT_EQ(refused, 1);
      expect_equal(got, expected, concat("around refused runs, kind ", kind));
    }
  });
}

TEST(Nested, TheSameTaskIsEvaluatedAndAStrategyOfItsOwnTrains) {
  on_threads(2, [](DistributedManager& manager) {
    const auto expected = around(manager, std::make_shared<DDPStrategy>(manager), {});
    const auto got = around(manager, std::make_shared<DDPStrategy>(manager), [&](Trainer& outer) {
      const auto source = ragged_batches(manager.rank(), 3);
      EXPECT_EQ(outer.validate(outer.task(), source).at("val/loss"),
                outer.test(outer.task(), source).at("test/loss"));
      EXPECT_EQ(outer.stage(), RunStage::train);
      Regression other;
      Trainer(with(std::make_shared<DDPStrategy>(manager), 1)).fit(other, source);
    });
    expect_equal(got, expected, "around evaluations and another strategy's run");
  });
}

// An evaluation inside a run that throws, on all ranks, ends as the callback wishes.
TEST(Nested, AnEvaluationThatThrowsLeavesTheSessionOfTheRun) {
  struct Throws : Regression {
    std::vector<at::Tensor> predict_step(const MicroBatch&, Step&) override {
      throw InvalidArgument("nothing is predicted");
    }
  };
  Throws task;
  TrainerOptions options;
  options.session.signals = false;
  int caught = 0;
  options.callbacks = {std::make_shared<Within>([&](Trainer& trainer) {
    EXPECT_THROW(trainer.predict(task, ragged_batches(0, 2)), InvalidArgument);
    ++caught;
  })};
  EXPECT_EQ(Trainer(options).fit(task, ragged_batches(0, 4)).steps, 4);
  EXPECT_EQ(caught, 1);
}

// A validation that throws, and that the callback survives, gives an average's parameters back.
TEST(Nested, AValidationThatThrowsEndsForTheCallbacksOfTheRun) {
  struct Throws : Regression {
    void validation_step(const MicroBatch&, Step&) override {
      throw InvalidArgument("nothing is validated");
    }
  };
  const auto trained = [&](bool averaged) {
    Throws task;
    TrainerOptions options;
    options.session.signals = false;
    if (averaged) options.callbacks.push_back(std::make_shared<Ema>(0.5));
    options.callbacks.push_back(std::make_shared<Within>([&](Trainer& trainer) {
      EXPECT_THROW(trainer.validate(task, ragged_batches(0, 2)), InvalidArgument);
    }));
    Trainer(options).fit(task, ragged_batches(0, 4));
    return task.values();
  };
  expect_equal(trained(true), trained(false), "around a validation that threw");
}

// One trainer after the other over one strategy, and sessions too.
TEST(Nested, AStrategyIsFreeWhenItsRunHasEnded) {
  on_threads(2, [](DistributedManager& manager) {
    const auto strategy = std::make_shared<DDPStrategy>(manager);
    Regression first, second;
    Trainer a(with(strategy, 1)), b(with(strategy, 1));
    a.fit(first, ragged_batches(manager.rank(), 2));
    b.fit(second, ragged_batches(manager.rank(), 2));
    expect_equal(first.values(), second.values(), "in turn");
    EXPECT_EQ(a.validate(first, ragged_batches(manager.rank(), 2)),
              b.validate(second, ragged_batches(manager.rank(), 2)));
    // The first one's session is no longer the strategy's.
    EXPECT_THROW(a.session().backward(torch::ones({}, at::kDouble), 1), InvalidArgument);
  });
  const auto one = std::make_shared<SingleDevice>();
  Regression task;
  {
    Session session(one, task.modules(), {.signals = false});
    EXPECT_THROW(Session(one, task.modules(), {.signals = false}), InvalidArgument);
  }
  Session again(one, task.modules(), {.signals = false});
}

}  // namespace tessera::test
