// Strategies: every one of them trains as one process does, on ragged batches; also where the user
// has defined the parallelism by hand.

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

TEST(Strategies, MistakesAreTold) {
  on_threads(2, [](DistributedManager& manager) {
    EXPECT_THROW(SingleDevice strategy(manager), InvalidArgument);
    EXPECT_THROW(ManualStrategy(manager, {.sharing = 3}), InvalidArgument);
    const auto mesh = manager.mesh({{"data", 2}});
    EXPECT_THROW(MeshStrategy(mesh, NamedPlacements{}, {}), InvalidArgument);
    EXPECT_THROW(MeshStrategy(mesh, NamedPlacements{}, {Partial()}), InvalidArgument);
    auto registry = StrategyRegistry::builtin();
    EXPECT_THROW(registry.make("fsdp9", manager), InvalidArgument);
    registry.add("mine",
                 [](const DistributedManager& m) { return std::make_shared<Mine>(m.world()); });
    EXPECT_THROW(registry.add("mine", [](const DistributedManager&) { return nullptr; }),
                 InvalidArgument);
    EXPECT_EQ(registry.names(), (std::vector<std::string>{"ddp", "manual", "mine", "single"}));
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

}  // namespace tessera::test
