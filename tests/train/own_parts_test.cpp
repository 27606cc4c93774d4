// What a user brings along: several runs in one process, strategies that restore before setup,
// optimizers that call the loss again, stores and groups of the program.

#include <cmath>
#include <mutex>
#include <thread>

#include "../support/stock_gloo.h"
#include "trouble.h"

namespace tessera::test {

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
  std::mutex mutex;
  std::vector<std::string> said(3);
  std::vector<std::thread> threads;
  const auto began = SteadyClock::now();
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        Regression task;
        Trainer(with(std::make_shared<ProcessGroupStrategy>(stock_group(store, rank, 3, "a")), 1))
            .fit(task, ragged_batches(rank, 4));
        const std::lock_guard lock(mutex);
        expect_near(task.values(), expected, "a group of the program");
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
      // An exception of one rank ends the others', though nobody can say why.
      try {
        Regression task;
        auto options =
            with(std::make_shared<ProcessGroupStrategy>(stock_group(store, rank, 3, "b")), 1);
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

// A search that fails, by an exception or by a loss that is not finite, leaves the parameters where
// they were, without a history of the places that it tried.
TEST(Session, AFailedSearchPutsTheParametersBack) {
  for (int ranks = 1; ranks <= 2; ++ranks) {
    on_threads(ranks, [](DistributedManager& manager) {
      for (const bool throws : {false, true}) {
        Searching task;
        Session session(std::make_shared<DDPStrategy>(manager), task.modules(),
                        {.measure_norm = true, .non_finite = NonFinite::skip, .signals = false});
        session.add(task.make());
        int fails_at = 0, evaluations = 0;
        // Two micro-batches, of which the second fails.
        const auto evaluate = [&] {
          ++evaluations;
          for (const bool last : {false, true}) {
            const bool fails = last && evaluations == fails_at;
            const auto data = ragged_data(manager.rank(), last ? 1 : 0);
            session.micro_batch(
                [&] {
                  if (fails && throws) throw Error("no loss");
                  const at::Tensor loss = torch::mse_loss(task.net->forward(data[0]), data[1]);
                  return fails && manager.rank() == 0 ? loss * std::nan("") : loss;
                },
                static_cast<double>(data[0].size(0)), last);
          }
        };
        const StepResult first = session.step_again(evaluate);
        EXPECT_EQ(session.steps(), 1);
        EXPECT_FALSE(session.optimizers()[0]->state().empty());
        const auto before = task.values();
        evaluations = 0;
        fails_at = 2;
        if (throws) {
          EXPECT_THROW(session.step_again(evaluate), Error);
          EXPECT_EQ(session.steps(), 1);
        } else {
          EXPECT_FALSE(session.step_again(evaluate).stepped);
          EXPECT_EQ(session.steps(), 2) << "a step that was left out";
        }
        EXPECT_EQ(evaluations, 2);
        expect_equal(task.values(), before, "put back");
        EXPECT_TRUE(session.optimizers()[0]->state().empty());
        for (const at::Tensor& p : task.net->parameters()) EXPECT_FALSE(p.grad().defined());
        // And the search goes on.
        fails_at = 0;
        const StepResult again = session.step_again(evaluate);
        EXPECT_TRUE(again.stepped);
        EXPECT_LT(again.loss, first.loss);
        EXPECT_EQ(again.weight, first.weight) << "nothing is left of what failed";
      }
    });
  }
}

}  // namespace tessera::test
