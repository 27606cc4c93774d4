// Strategies: every one of them trains as one process does, on ragged batches; also where the user
// has defined the parallelism by hand.

#include <numeric>
#include <optional>

#include "../support/stock_gloo.h"
#include "cases.h"

namespace tessera::test {

TEST(Strategies, EachTrainsAsOneProcessDoes) {
  for (int ranks = 1; ranks <= 4; ++ranks) on_threads(ranks, each_strategy_case);
}

// Saved by all ranks, loaded by another number.
TEST(ByHand, AnEmbeddingTableCutByHandBesideDataParallelism) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Folder folder;
    on_threads(ranks, [&](DistributedManager& m) { table_case(m, folder.path(), ranks, false); });
    on_threads(ranks == 2 ? 3 : 2,
               [&](DistributedManager& m) { table_case(m, folder.path(), ranks, true); });
  }
}

TEST(ByHand, DataParallelAndFullySharded) {
  for (int ranks = 1; ranks <= 4; ++ranks) on_threads(ranks, mixed_case);
}

TEST(ByHand, TeardownLeavesWhatTheUserMade) {
  on_threads(2, [](DistributedManager& manager) {
    auto net = small_net();
    DistributedDataParallel ddp(net, manager.world());
    const at::Tensor handle = net->parameters()[0];
    const void* memory = handle.const_data_ptr();
    {
      Regression task(net);
      auto options = with(std::make_shared<ManualStrategy>(manager), 2);
      Trainer(options).fit(task, ragged_batches(manager.rank(), 4));
    }
    EXPECT_EQ(net->parameters()[0].const_data_ptr(), memory);
    EXPECT_EQ(net->parameters()[0].unsafeGetTensorImpl(), handle.unsafeGetTensorImpl());
    // The user's wrapper still reduces, and the groups still serve.
    net->zero_grad();
    (ddp(at::ones({1, 3}, at::kDouble)).sum() * (manager.rank() + 1)).backward();
    const at::Tensor gradient = net->parameters()[0].grad();
    at::Tensor other = gradient.clone();
    manager.world().broadcast(other, 0);
    EXPECT_TRUE(other.equal(gradient));
  });
}

namespace {

// Makes and wraps its module when the ranks are known.
class MadeInSetup : public Regression {
 public:
  explicit MadeInSetup(const DistributedManager& m, int throws_on = -1)
      : Regression(nullptr), manager(m), throws_on(throws_on) {}
  void setup(Strategy& strategy) override {
    ++setups;
    if (strategy.rank() == throws_on) throw InvalidArgument("no net here");
    if (net) return;
    net = small_net();
    net->to(strategy.root_device());
    ddp.emplace(net, manager.group(all(strategy.size())));
  }
  static std::vector<int> all(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  const DistributedManager& manager;
  std::optional<DistributedDataParallel<torch::nn::Sequential>> ddp;
  const int throws_on;
  int setups = 0;
};

}  // namespace

TEST(ByHand, ATaskThatIsSetUpWithTheStrategy) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto expected = alone(ranks, 4, 1, with(nullptr, 1));
    on_threads(ranks, [&](DistributedManager& manager) {
      MadeInSetup task(manager);
      const auto strategy = std::make_shared<ManualStrategy>(manager);
      Trainer(with(strategy, 1)).fit(task, ragged_batches(manager.rank(), 4));
      expect_near(task.values(), expected, concat(ranks, " ranks"));
      Trainer(with(strategy, 1)).validate(task, ragged_batches(manager.rank(), 4));
      EXPECT_EQ(task.setups, 2) << "once a run";
      expect_near(task.values(), expected, "validated");
      MadeInSetup broken(manager, ranks - 1);
      const auto run = [&] {
        Trainer(with(std::make_shared<ManualStrategy>(manager), 1))
            .fit(broken, ragged_batches(manager.rank(), 4));
      };
      if (manager.rank() == ranks - 1)
        EXPECT_THROW(run(), InvalidArgument);
      else
        EXPECT_THROW(run(), CommError);
    });
  }
}

// The user's own loop: the session's parts are right without the trainer, and go on bit by bit.
TEST(Session, ALoopOfOnesOwnEqualsOneProcess) {
  constexpr std::int64_t kMicro = 7, kAccumulate = 3, kEpochs = 2, kSaved = 4;
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto expected = alone(ranks, kMicro, kAccumulate, with(nullptr, 1));
    const Folder folder;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto loop = [&](bool resume) {
        Regression task;
        Session session(std::make_shared<DDPStrategy>(manager), task.modules(),
                        {.clip = {.max_norm = 0.5}, .signals = false});
        session.add(task.optimizers()[0]);
        Checkpointer checkpoints(manager, folder.path());
        if (resume) session.load(CheckpointReader(manager.world(), folder.path(), "c"));
        std::int64_t step = 0;
        for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
          for (std::int64_t k = 0; k < kMicro; k += kAccumulate, ++step) {
            if (step < session.steps()) continue;
            const std::int64_t end = std::min(k + kAccumulate, kMicro);
            for (std::int64_t i = k; i < end; ++i) {
              const auto data = ragged_data(manager.rank(), epoch * kMicro + i);
              session.micro_batch(
                  [&] { return torch::mse_loss(task.net->forward(data[0]), data[1]); },
                  static_cast<double>(data[0].size(0)), i + 1 == end);
            }
            const StepResult done = session.step();
            EXPECT_EQ(done.stop, Stop::none);
            EXPECT_TRUE(std::isfinite(done.norm));
            if (!resume && session.steps() == kSaved) checkpoints.start_save("c", session.state());
          }
        }
        checkpoints.wait();
        return task.values();
      };
      const auto straight = loop(false);
      expect_near(straight, expected, concat("a loop on ", ranks, " ranks"));
      expect_equal(loop(true), straight, "resumed");
    });
  }
}

// A c10d group of the program's own.
TEST(Strategies, AForeignProcessGroupTrainsSavesAndGoesOn) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto expected = alone(ranks, 4, 1, with(nullptr, 1));
    const Folder folder;
    for (const std::int64_t epochs : {1, 2}) {
      const auto store = c10::make_intrusive<c10d::HashStore>();
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto strategy =
            std::make_shared<ProcessGroupStrategy>(stock_group(store, manager.rank(), ranks));
        EXPECT_EQ(strategy->broadcast(std::string(manager.rank(), 'x'), ranks - 1),
                  std::string(ranks - 1, 'x'));
        const auto all = strategy->all_gather(std::string(manager.rank(), 'y'));
        for (int r = 0; r < ranks; ++r) EXPECT_EQ(all[r], std::string(r, 'y'));
        const at::Tensor mean = at::full({2, 3}, manager.rank(), at::kDouble).t();
        strategy->reduce(mean, ReduceOp::avg);
        EXPECT_EQ(mean[2][1].item<double>(), (ranks - 1) / 2.0);
        Regression task(small_net(manager.rank() == 0 ? 11 : 12));  // the first rank's counts
        auto options = with(strategy, 1);
        options.max_epochs = epochs;
        options.checkpoint.folder = folder.path();
        options.checkpoint.resume = true;
        options.callbacks = {std::make_shared<CheckpointCallback>(
            CheckpointCallbackOptions{.every_epochs = 1, .at_end = false})};
        const FitResult result = Trainer(options).fit(task, ragged_batches(manager.rank(), 4));
        EXPECT_EQ(result.steps, 4 * epochs);
        if (epochs == 2) expect_near(task.values(), expected, "a foreign group");
      });
    }
  }
}

// Whatever looks at them between two steps finds one state: validations, callbacks, checkpoints.
TEST(Strategies, BuffersAreTheFirstRanksAfterEachStepAndEvaluation) {
  struct Compares : Callback {
    explicit Compares(const Group& group) : world(group) {}
    std::string name() const override { return "compares"; }
    void on_step_end(Trainer& t, const StepResult&) override { compare(t); }
    void on_validation_start(Trainer& t) override { compare(t); }
    void on_validation_end(Trainer& t, bool) override { compare(t); }
    void compare(Trainer& trainer) {
      ++calls;
      for (const at::Tensor& b : trainer.session().modules()[0].module->buffers()) {
        const auto bytes = [](const at::Tensor& t) {
          return std::string(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
        };
        for (const std::string& other : world.all_gather_bytes(bytes(b)))
          EXPECT_EQ(other, bytes(b));
      }
    }
    const Group& world;
    int calls = 0;
  };
  for (const bool group : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_threads(3, [&](DistributedManager& manager) {
      std::shared_ptr<Strategy> strategy = std::make_shared<DDPStrategy>(manager);
      if (group)
        strategy = std::make_shared<ProcessGroupStrategy>(stock_group(store, manager.rank(), 3));
      Regression task(remembering_net());
      auto options = with(strategy, 2);
      const Group world = manager.world();
      const auto compares = std::make_shared<Compares>(world);
      options.callbacks = {compares};
      Trainer(options).fit(task, ragged_batches(manager.rank(), 5),
                           ragged_batches(manager.rank() + 5, 2));
      EXPECT_GT(compares->calls, 6);
      EXPECT_GT(task.net->buffers()[2].item<std::int64_t>(), 0) << "rows were seen";
    });
  }
}

TEST(Strategies, MistakesAreTold) {
  on_threads(2, [](DistributedManager& manager) {
    EXPECT_THROW(SingleDevice strategy(manager), InvalidArgument);
    EXPECT_THROW(ManualStrategy(manager, {.sharing = 3}), InvalidArgument);
    const auto mesh = manager.mesh({{"data", 2}});
    EXPECT_THROW(MeshStrategy(mesh, NamedPlacements{}, std::vector<Placement>{}), InvalidArgument);
    // A mesh of some ranks: they train by themselves.
    const auto own = manager.mesh(Mesh({{"data", 1}}, {manager.rank()}));
    Regression one;
    Trainer(with(std::make_shared<MeshStrategy>(own, NamedPlacements{}, std::vector{Shard(0)}), 1))
        .fit(one, ragged_batches(0, 3));
    expect_near(one.values(), alone(1, 3, 1, with(nullptr, 1)), "alone");
    EXPECT_THROW(MeshStrategy(mesh, NamedPlacements{}, {Partial()}), InvalidArgument);
    auto registry = StrategyRegistry::builtin();
    registry.add("mine", [](const DistributedManager& m, const StrategyParts&) {
      return std::make_shared<Mine>(m.world());
    });
    EXPECT_THROW(registry.add("mine", [](const DistributedManager&,
                                         const StrategyParts&) { return nullptr; }),
                 InvalidArgument);
    const auto mine = registry.make("mine", manager);
    EXPECT_EQ(mine->size(), 2);
    EXPECT_TRUE(mine->any(manager.rank() == 1));
    EXPECT_FALSE(mine->all(manager.rank() == 1));
    // Tensors of any sizes, by rank.
    const auto all = mine->all_gather(at::arange(manager.rank() * 2, at::kInt));
    EXPECT_EQ(all[0].numel(), 0);
    EXPECT_TRUE(all[1].equal(at::arange(2, at::kInt)));
    // A strategy without a manager cannot save several ranks.
    auto options = with(mine, 1);
    options.checkpoint.folder = "nowhere";
    Regression task;
    EXPECT_THROW(Trainer(options).fit(task, ragged_batches(manager.rank(), 1)), NotAvailable);
    EXPECT_THROW(check_modules({{"a.b", task.net.ptr()}}), InvalidArgument);
    EXPECT_THROW(check_modules({{"a", task.net.ptr()}, {"a", task.net.ptr()}}), InvalidArgument);
  });
}

// Where batches go, and what is moved: by hand nothing but, if a device is named, the batches.
TEST(Strategies, TheRootDeviceSaysWhereBatchesGo) {
  const auto meta = c10::Device(c10::DeviceType::Meta);
  on_threads(3, [&](DistributedManager& manager) {
    const auto batch = [] {
      MicroBatch one = make_batch({at::ones({2, 3}), at::ones({2, 2})});
      one.mask = at::ones({2}, at::kBool);
      return one;
    };
    const auto expect_on = [](const MicroBatch& placed, c10::DeviceType type) {
      for (const at::Tensor& t : placed.tensors) EXPECT_EQ(t.device().type(), type);
      EXPECT_EQ(placed.mask.device().type(), type);
    };
    auto net = small_net();
    MicroBatch placed = batch();
    ManualStrategy left(manager);
    left.setup({{"net", net.ptr()}});
    left.place(placed);
    expect_on(placed, c10::DeviceType::CPU);
    ManualStrategy named(manager, {.device = meta});
    named.setup({{"net", net.ptr()}});
    EXPECT_EQ(named.root_device(), meta);
    named.place(placed);
    expect_on(placed, c10::DeviceType::Meta);
    EXPECT_TRUE(net->parameters()[0].device().is_cpu()) << "modules stay where the user put them";
  });
}

// Pairs of ranks have the same samples. A mean over all ranks holds each loss twice, one over the
// ranks with other samples once; the step is that of one process either way.
TEST(Session, AMeanCountsALossThatRanksShareOnce) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"copy", 2}});
    const int row = mesh.coordinate()[0];
    const auto sgd = [](torch::nn::Sequential& net) {
      return std::make_shared<torch::optim::SGD>(net->parameters(), 0.5);
    };
    const auto mean = [](torch::nn::Sequential& net, const std::vector<at::Tensor>& batch) {
      return torch::mse_loss(net->forward(batch[0]), batch[1]);
    };
    const std::vector<at::Tensor> first = ragged_data(0, 1), second = ragged_data(1, 1);
    auto alone = small_net();
    const auto expected = sgd(alone);
    mean(alone, {at::cat({first[0], second[0]}), at::cat({first[1], second[1]})}).backward();
    expected->step();
    const auto strategy = [&](int sharing) {
      return std::make_shared<ManualStrategy>(manager, ManualOptions{.sharing = sharing});
    };
    const std::vector<at::Tensor>& mine = row == 0 ? first : second;
    const auto step = [&](torch::nn::Sequential& net, int sharing) {
      Session session(strategy(sharing), {{"net", net.ptr()}}, {.signals = false});
      session.add(sgd(net));
      session.micro_batch([&] { return mean(net, mine); }, static_cast<double>(mine[0].size(0)));
      session.step();
    };
    for (const Group& over : {manager.world(), mesh.group("data")}) {
      auto net = small_net();
      const DistributedDataParallel ddp(net, over);
      step(net, 2);
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_LT(difference(net->parameters()[i], alone->parameters()[i]), 1e-12) << over.name();
    }
    // Four ranks with samples of their own, and gradients of two of them.
    auto net = small_net();
    const DistributedDataParallel ddp(net, mesh.group("data"));
    EXPECT_THROW(step(net, 1), GradientError);
  });
}

}  // namespace tessera::test
