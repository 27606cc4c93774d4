// Plans of ghosts: their group, and what is wrong with a partition, with rows and with requests, as
// every rank is told it.

#include "tessera/ops/ghosts/ghost_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "cut_rows.h"

namespace tessera::test::ghost_plans_test {
namespace {

TEST(GhostPlans, AreOfTheGroupsAlongAxesToo) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    const int me = mesh.group("domain").rank();
    const GhostPlan plan(mesh, {1}, Ids{me}, Ids{1 - me});
    EXPECT_EQ(plan.group().ranks(), mesh.group("domain").ranks());
    const double value = manager.rank();
    const at::Tensor h = ghost_exchange(plan, at::full({1}, value, at::kDouble));
    EXPECT_EQ(h[1].item<double>(), me == 0 ? value + 1 : value - 1);
  });
}

TEST(GhostPlans, WrongPartitionsAreRefusedOnEveryRank) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    struct Wrong {
      std::vector<Ids> owned, needed;
      std::vector<std::string> says;
    };
    const std::vector<Wrong> all{
        {{{1, 2}, {3}, {2}}, {{}, {}, {}}, {"two ranks own: 2 (ranks 0 and 2)"}},
        {{{1}, {3}, {}}, {{3}, {}, {1, 9}}, {"no rank owns: 9 (needed by rank 2)"}},
        {{{1}, {-3}, {}}, {{}, {}, {}}, {"rank 1", "negative ids: -3 (owned row 0)"}},
        {{{1}, {3}, {}}, {{}, {}, {-1}}, {"rank 2", "negative ids: -1 (ghost 0)"}},
        {{{1}, {3, 4, 3}, {}}, {{}, {}, {}}, {"rank 1", "3 (rows 0 and 2)"}},
        {{{1}, {3}, {8}}, {{}, {}, {3, 8}}, {"rank 2", "owns itself: 8 (ghost 1, row 0)"}},
    };
    for (const Wrong& wrong : all) {
      const int me = manager.rank();
      const std::string text =
          thrown<InvalidArgument>([&] { GhostPlan(mesh, wrong.owned[me], wrong.needed[me]); });
      for (const std::string& part : wrong.says)
        EXPECT_NE(text.find(part), std::string::npos) << text;
    }
    // The group is as it was.
    const GhostPlan plan(mesh, Ids{manager.rank()}, Ids{(manager.rank() + 1) % 3});
    const at::Tensor h = ghost_exchange(plan, at::full({1, 2}, manager.rank(), at::kLong));
    EXPECT_EQ(h[1][1].item<int>(), (manager.rank() + 1) % 3);
  });
}

TEST(GhostPlans, WrongRowsOnOneRankAreLearntByAll) {
  on_ranks(3, [](DistributedManager& manager) {
    // A rank that fails leaves messages, with which MPI cannot be finalised (docs/errors.md).
    if (manager.world().backend() == "mpi") GTEST_SKIP() << "over MPI the job would end with 1";
    const auto mesh = manager.mesh({{"domain", 3}});
    const int me = manager.rank();
    const GhostPlan plan(mesh, Ids{me, me + 10}, Ids{(me + 1) % 3});
    const auto right = at::full({2}, me, at::kDouble);
    for (int round = 0; round < 2; ++round) {
      // Rank 1 is wrong; the ring makes all wait for it.
      std::string text;
      try {
        ghost_exchange(plan, me == 1 ? at::zeros({5}, at::kDouble) : right);
        manager.world().barrier();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const InvalidArgument& e) {
        EXPECT_EQ(me, 1);
        text = e.what();
      } catch (const PeerFailedError& e) {
        EXPECT_NE(me, 1);
        text = e.what();
      }
      EXPECT_NE(text.find("a tensor of 5 rows; the plan's partition has 2 owned"),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
      manager.world().barrier();
      // The plan goes on with groups that are made anew.
      EXPECT_EQ(ghost_exchange(plan, right)[2].item<double>(), (me + 1) % 3);
    }
  });
}

TEST(GhostPlans, AtTheCollectiveLevelAllRanksAreRefusedAlike) {
  on_ranks(2, [](DistributedManager& manager) {
    manager.set_check_level(CheckLevel::collective);
    const auto mesh = manager.mesh({{"domain", 2}});
    const int me = manager.rank();
    const GhostPlan plan(mesh, Ids{me}, Ids{1 - me}), other(mesh, Ids{5 - me}, Ids{4 + me});
    const at::Tensor x = at::ones({1, 2}, at::kDouble);
    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      const std::string text = thrown<InvalidArgument>(call);
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    refused("plan ", [&] { ghost_exchange(me == 0 ? plan : other, x); });
    refused("rank 0", [&] { ghost_exchange(plan, me == 0 ? at::ones({3, 2}, at::kDouble) : x); });
    refused("Float", [&] { ghost_exchange(plan, me == 0 ? x.to(at::kFloat) : x); });
    refused("rows [4]", [&] { ghost_exchange(plan, me == 0 ? at::ones({1, 4}, at::kDouble) : x); });
    refused("gradient", [&] { ghost_exchange(plan, x.clone().requires_grad_(me == 0)); });
    const at::Tensor h = ghost_exchange(plan, x);
    refused("by max", [&] { ghost_reduce(plan, h, me == 0 ? ReduceOp::max : ReduceOp::sum); });
    EXPECT_TRUE(ghost_reduce(plan, h).equal(2 * x));
    manager.set_check_level(CheckLevel::local);
  });
}

TEST(GhostPlans, BadRequestsSayWhatIsWrong) {
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 1}});
    const GhostPlan plan(mesh, Ids{4, 2}, Ids{});
    const at::Tensor x = at::ones({2, 3});
    EXPECT_FALSE(GhostPlan());
    EXPECT_THROW(GhostPlan().summary(), InvalidArgument);
    EXPECT_THROW(ghost_exchange(GhostPlan(), x), InvalidArgument);
    EXPECT_THROW(ghost_reduce(GhostPlan(), x), InvalidArgument);
    EXPECT_THROW(ghost_exchange(plan, at::Tensor()), InvalidArgument);
    EXPECT_THROW(ghost_exchange(plan, at::ones({})), InvalidArgument);
    EXPECT_THROW(ghost_exchange(plan, at::ones({3})), InvalidArgument);
    EXPECT_THROW(ghost_exchange(plan, x.to_sparse()), InvalidArgument);
    EXPECT_THROW(ghost_exchange(plan, leaf(x, ShardSpec(mesh, {2, 3}, {Shard(0)}))),
                 InvalidArgument);
    EXPECT_THROW(ghost_reduce(plan, x, ReduceOp::avg), InvalidArgument);
    EXPECT_THROW(ghost_reduce(plan, x.to(at::kBool)), InvalidArgument);
    EXPECT_THROW(ghost_reduce(plan, at::complex(x, x), ReduceOp::max), InvalidArgument);
    EXPECT_THROW(GhostPlan(mesh, {3}, Ids{}, Ids{}), Error) << "no such axis";
    const at::Tensor h = ghost_exchange(plan, x);
    EXPECT_TRUE(h.equal(x));
    EXPECT_NE(h.data_ptr(), x.data_ptr());
    const at::Tensor nan = at::full({2, 3}, std::nan(""));
    EXPECT_TRUE(at::isnan(ghost_reduce(plan, nan, ReduceOp::min)).all().item<bool>());
  });
}

TEST(GhostPlans, NaNOfAnyCopyPropagates) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const int me = manager.rank();
    const GhostPlan plan(mesh, Ids{me, 2 + me}, Ids{1 - me, 3 - me});
    at::Tensor rows = at::ones({4, 1}, at::kDouble);
    rows[me == 0 ? 0 : 3][0] = std::nan("");  // rank 0's own first row; rank 1's ghost of id 2
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      const at::Tensor y = ghost_reduce(plan, rows, op);
      EXPECT_EQ(at::isnan(y).sum().item<int>(), me == 0 ? 2 : 0) << to_string(op.kind);
    }
  });
}

}  // namespace
}  // namespace tessera::test::ghost_plans_test
