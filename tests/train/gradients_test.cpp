// What becomes of parameters that change their ways in the middle of a run, that only an optimizer
// knows, or that are no floating-point numbers.

#include <cmath>

#include "cases.h"
#include "trouble.h"

namespace tessera::test {

namespace {

// As Mine, but what it makes of the gradients is their mean.
class MineAveraged : public Mine {
 public:
  explicit MineAveraged(Group group) : Mine(group), group_(std::move(group)) {}
  Abilities abilities() const override {
    Abilities can = Mine::abilities();
    can.gradients = Abilities::Gradients::averaged;
    return can;
  }
  void reduce_gradients() override {
    for (const NamedModule& m : modules())
      for (at::Tensor& p : m.module->parameters())
        if (p.grad().defined()) group_.all_reduce(p.mutable_grad(), ReduceOp::avg);
  }

 private:
  Group group_;
};

// The first layer is frozen until the third step; `thawed` is called then.
struct Thaws : Callback {
  explicit Thaws(std::function<void()> then = {}) : thawed(std::move(then)) {}
  std::string name() const override { return "thaws"; }
  void on_step_end(Trainer& trainer, const StepResult&) override {
    if (trainer.step() != 2) return;
    for (at::Tensor& p : trainer.session().modules()[0].module->children()[0]->parameters())
      p.set_requires_grad(true);
    if (thawed) thawed();
  }
  std::function<void()> thawed;
};

struct Frozen : Regression {
  Frozen() {
    for (at::Tensor& p : net->ptr(0)->parameters()) p.set_requires_grad(false);
  }
};

TrainerOptions thawing(std::shared_ptr<Strategy> strategy, std::function<void()> then = {}) {
  auto options = with(std::move(strategy), 1);
  options.max_epochs = 1;
  options.callbacks = {std::make_shared<Thaws>(std::move(then))};
  return options;
}

}  // namespace

TEST(Gradients, AParameterThatIsUnfrozenMidwayTrainsAsInOneProcess) {
  for (const int ranks : {2, 3}) {
    Frozen alone;
    Trainer(thawing(nullptr)).fit(alone, joined_batches(ranks, 6, 1));
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto train = [&](const std::string& name, Frozen& task, TrainerOptions options) {
        Trainer(options).fit(task, ragged_batches(manager.rank(), 6));
        expect_near(task.values(), alone.values(), concat(name, ", ", ranks, " ranks"));
      };
      Frozen mine, averaged, group, manual;
      train("summed", mine, thawing(std::make_shared<Mine>(manager.world())));
      train("averaged", averaged, thawing(std::make_shared<MineAveraged>(manager.world())));
      train("process group", group,
            thawing(std::make_shared<ProcessGroupStrategy>(manager.world().process_group())));
      // Wrapped anew when it has thawed.
      auto wrapped = std::make_unique<DistributedDataParallel<torch::nn::Sequential>>(
          manual.net, manager.world());
      train("wrapped anew", manual, thawing(std::make_shared<ManualStrategy>(manager), [&] {
              wrapped.reset();
              wrapped = std::make_unique<DistributedDataParallel<torch::nn::Sequential>>(
                  manual.net, manager.world());
            }));
    });
  }
}

// In a loop that makes its forward by itself, too.
TEST(Gradients, AParameterThatIsUnfrozenMidwayIsRefusedWhereNothingReducesIt) {
  on_threads(2, [](DistributedManager& manager) {
    Frozen task;
    Session session(std::make_shared<DDPStrategy>(manager), task.modules(), {.signals = false});
    session.add(task.optimizers()[0]);
    for (at::Tensor& p : task.net->ptr(0)->parameters()) p.set_requires_grad(true);
    const auto batch = ragged_data(manager.rank(), 0);
    const at::Tensor loss = torch::mse_loss(task.net->forward(batch[0]), batch[1]);
    EXPECT_THROW(session.backward(loss, static_cast<double>(batch[0].size(0))), GradientError);
  });
}

// Parameters that an optimizer gets when the session has it already are divided and cleared, too.
TEST(Gradients, AGroupOfParametersThatIsAddedMidwayTrainsAsTheOthers) {
  struct Late : Regression {
    Optimizers optimizers() override {
      made = std::make_shared<torch::optim::SGD>(net->ptr(0)->parameters(), 0.1);
      return {made};
    }
    std::shared_ptr<torch::optim::SGD> made;
  };
  struct Adds : Callback {
    explicit Adds(Late& to) : task(to) {}
    std::string name() const override { return "adds"; }
    void on_step_end(Trainer& trainer, const StepResult&) override {
      if (trainer.step() == 2) task.made->add_param_group({task.net->ptr(2)->parameters()});
    }
    Late& task;
  };
  const auto train = [](Late& task, std::shared_ptr<Strategy> strategy,
                        std::shared_ptr<BatchSource> source) {
    auto options = with(std::move(strategy), 1);
    options.max_epochs = 1;
    options.callbacks = {std::make_shared<Adds>(task)};
    Trainer(options).fit(task, std::move(source));
    return task.values();
  };
  Late alone;
  const auto expected = train(alone, nullptr, joined_batches(2, 5, 1));
  on_threads(2, [&](DistributedManager& manager) {
    Late task;
    expect_near(
        train(task, std::make_shared<DDPStrategy>(manager), ragged_batches(manager.rank(), 5)),
        expected, "a group added midway");
  });
}

TEST(Gradients, AParameterOfNoModuleIsRefusedWhereNothingReducesIt) {
  struct Extra : Regression {
    Optimizers optimizers() override {
      return {std::make_shared<torch::optim::SGD>(
          std::vector<at::Tensor>{net->parameters()[0], own}, 0.1)};
    }
    at::Tensor training_step(const MicroBatch& batch, Step& step) override {
      return Regression::training_step(batch, step) * own;
    }
    at::Tensor own = torch::ones({}, at::TensorOptions(at::kDouble).requires_grad(true));
  };
  for (const bool group : {false, true}) {
    const Outcomes all = outcomes_on(2, [&](DistributedManager& manager) {
      Extra task;
      std::shared_ptr<Strategy> strategy;
      if (group)
        strategy = std::make_shared<ProcessGroupStrategy>(manager.world().process_group());
      else
        strategy = std::make_shared<DDPStrategy>(manager);
      EXPECT_THROW(Trainer(with(strategy, 1)).fit(task, ragged_batches(manager.rank(), 2)),
                   GradientError);
    });
    for (const std::string& said : all.said) EXPECT_EQ(said, "");
  }
  Extra task;  // one process has all of its gradient
  Trainer(with(nullptr, 1)).fit(task, ragged_batches(0, 2));
  EXPECT_NE(task.own.item<double>(), 1);
}

// Indices, masks and counters stay what they are; complex numbers keep both parts.
TEST(Precision, ConvertsNumbersWithAFractionAlone) {
  struct Odd : torch::nn::Module {
    Odd() {
      weight = register_parameter("weight", torch::ones({3, 2}, at::kFloat));
      waves = register_parameter(
          "waves", at::complex(torch::full({2}, 0.5, at::kFloat), torch::ones({2}, at::kFloat)));
      index = register_buffer("index", torch::tensor({1, 0}, at::kLong));
      mask = register_buffer("mask", torch::tensor({true, false}));
      counter = register_buffer("counter", torch::tensor(std::int64_t{16777217}));
      mean = register_buffer("mean", torch::full({2}, 0.25, at::kFloat));
      register_buffer("absent", at::Tensor());
    }
    at::Tensor weight, waves, index, mask, counter, mean;
  };
  struct Task64 : Task {
    std::shared_ptr<Odd> odd = std::make_shared<Odd>();
    NamedModules modules() override { return {{"odd", odd}}; }
    Optimizers optimizers() override {
      return {std::make_shared<torch::optim::SGD>(odd->parameters(), 0.1)};
    }
    at::Tensor training_step(const MicroBatch& batch, Step&) override {
      const at::Tensor y = batch.tensors[0].matmul(odd->weight);
      const at::Tensor chosen = y.index_select(1, odd->index).masked_fill(odd->mask, 0.0);
      return chosen.square().mean() + at::view_as_real(odd->waves).square().sum();
    }
  };
  for (const auto& [precision, real, complex] :
       {std::tuple{Precision::float64, at::kDouble, at::kComplexDouble},
        std::tuple{Precision::float32, at::kFloat, at::kComplexFloat}}) {
    Task64 task;
    TrainerOptions options;
    options.session.signals = false;
    options.session.precision = precision;
    Trainer(options).fit(task, batches_of({make_batch({torch::ones({4, 3})})}));
    EXPECT_EQ(task.odd->weight.scalar_type(), real);
    EXPECT_EQ(task.odd->mean.scalar_type(), real);
    EXPECT_EQ(task.odd->waves.scalar_type(), complex);
    EXPECT_NEAR(at::imag(task.odd->waves.detach())[0].item<double>(), 0.8, 1e-6);
    EXPECT_EQ(task.odd->index.scalar_type(), at::kLong);
    EXPECT_EQ(task.odd->mask.scalar_type(), at::kBool);
    EXPECT_EQ(task.odd->counter.item<std::int64_t>(), 16777217);
  }
}

}  // namespace tessera::test
