// The policy on what moves by itself.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::implicit_moves_test {

TEST(Policy, NamesOperatorTensorsPlacementsAndBytes) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(randn({4, 6}, at::kDouble), mesh, {Shard(0)});
    set_policies(manager, {.redistribution = Policy::error});
    std::string why = "nothing was thrown";
    try {
      at::cumsum(x, 0);
    } catch (const ImplicitRedistributionError& e) {
      why = e.what();
    }
    for (const char* part :
         {"aten::cumsum", "self from [4, 6] x=Shard(0)[2, 2] to [4, 6] x=Shard(1)[3, 3]",
          "48 bytes", "Redistribute explicitly"})
      EXPECT_NE(why.find(part), std::string::npos) << why;
    EXPECT_NO_THROW(at::cumsum(redistribute(x, {Shard(1)}), 0))
        << "what is written is not implicit";
    EXPECT_NO_THROW(full_tensor(x.sum())) << "a partial value is reduced without asking";
  });
}

TEST(Policy, WarnsOnceForEachCallSite) {
  struct Counting final : c10::WarningHandler {
    void process(const c10::Warning& w) override {
      if (w.msg().find("aten::cumsum redistributes") != std::string::npos) ++count;
    }
    int count = 0;
  };
  on_ranks(2, [](DistributedManager& manager) {
    Counting counting;
    const c10::WarningUtils::WarningHandlerGuard guard(&counting);
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(randn({4, 6}, at::kDouble), mesh, {Shard(0)});
    for (int i = 0; i < 5; ++i) at::cumsum(x, 0);
    const int mine = manager.rank() == 0 ? 1 : 0;  // the first rank speaks for all
    EXPECT_EQ(counting.count, mine);
    at::cumsum(x, 0);
    EXPECT_EQ(counting.count, 2 * mine) << "another place";
    set_policies(manager, {.redistribution = Policy::allow});
    at::cumsum(x, 0);
    EXPECT_EQ(counting.count, 2 * mine);
  });
}

TEST(Policy, AHandlerOfWarningsMayAskForPolicies) {
  struct Asking final : c10::WarningHandler {
    explicit Asking(const DistributedManager& m) : manager(m) {}
    void process(const c10::Warning&) override {
      warns += policies(manager).promotion == Policy::warn;
    }
    const DistributedManager& manager;
    int warns = 0;
  };
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::warn, .promotion = Policy::warn});
    Asking asking(manager);
    const c10::WarningUtils::WarningHandlerGuard guard(&asking);
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(randn({4, 6}, at::kDouble), mesh, {Shard(0)});
    at::cumsum(x, 0);
    x.mul(at::ones({6}, at::kDouble));
    EXPECT_EQ(asking.warns, manager.rank() == 0 ? 2 : 0);
  });
}

// What a user writes to be sure that a layer moves nothing.
TEST(Policy, ALayerThatMovesNothing) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear layer(6, 4);
    distribute_module(*layer, mesh);
    const at::Tensor x = distribute_tensor(randn({5, 6}), mesh, {Shard(0)});
    const CommTraceScope trace(manager);
    torch::relu(layer(x));
    EXPECT_TRUE(trace->events().empty()) << trace->table();
  });
}

}  // namespace tessera::test::implicit_moves_test
