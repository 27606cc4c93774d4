// Data that are not there, or not everywhere, and numbers that are not finite: all ranks are told
// the same.

#include <cmath>

#include "trouble.h"

namespace tessera::test {

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
    expect_all_told(outcomes_on(2, [&](DistributedManager& m) { fit(m, 0, policy); }),
                    "has no batch");
  // One rank has none.
  const auto one = [&](UnevenData policy) {
    return outcomes_on(2, [&](DistributedManager& m) { fit(m, m.rank() == 1 ? 0 : 3, policy, 5); });
  };
  expect_all_told(one(UnevenData::drop), "has no batch");
  expect_all_told(one(UnevenData::error), "different numbers of batches");
  for (const UnevenData policy : {UnevenData::pad, UnevenData::weight_zero})
    for (const std::string& said : one(policy).said) EXPECT_EQ(said, "");
  // Batches without rows, on all ranks at once: there is nothing to divide by.
  expect_all_told(outcomes_on(2,
                              [](DistributedManager& manager) {
                                Regression task;
                                const auto none = make_batch({at::zeros({0, 3}, at::kDouble),
                                                              at::zeros({0, 2}, at::kDouble)});
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
    return outcomes_on(2, [=](DistributedManager& manager) {
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
    expect_all_told(outcomes_on(ranks, [&](DistributedManager& m) { run(m, NonFinite::error); }),
                    "are not finite");
  on_threads(2, [&](DistributedManager& m) {
    run(m, NonFinite::skip);
    run(m, NonFinite::step);
  });
  // A loss that is never finite: the scale of float16 shrinks to its end, on all ranks alike.
  expect_all_told(outcomes_on(2,
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

}  // namespace tessera::test
