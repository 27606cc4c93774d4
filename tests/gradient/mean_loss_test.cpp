#include "tessera/gradient/step_weight.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/job/threads.h"

namespace tessera {
namespace {

TEST(MeanLoss, IsTheMeanOverAllSamplesWithItsGradient) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (int seed = 0; seed < 10; ++seed) {
      torch::manual_seed(seed);
      std::vector<torch::Tensor> data;
      for (int r = 0; r < ranks; ++r)
        data.push_back(
            torch::randn({seed == 0 && r == 0 ? 3 : torch::randint(0, 5, {1}).item<int64_t>(), 4},
                         torch::kDouble));
      if (torch::cat(data).size(0) == 0) continue;
      auto w = torch::randn({4}, torch::kDouble).requires_grad_();
      auto whole = torch::cat(data).matmul(w).square().mean();
      whole.backward();
      run_threads(ranks, [&](DistributedManager& manager) {
        const int r = manager.rank();
        auto mine = w.detach().clone().requires_grad_();
        auto loss = mean_loss(data[r].matmul(mine).square().mean(),
                              static_cast<double>(data[r].size(0)), manager.world());
        EXPECT_NEAR(loss.item<double>(), whole.item<double>(), 1e-12);
        loss.backward();
        auto gradient = mine.grad().clone();
        manager.world().all_reduce(gradient, ReduceOp::avg);
        EXPECT_TRUE(torch::allclose(gradient, w.grad(), 1e-12, 1e-12)) << gradient << w.grad();
      });
    }
}

TEST(MeanLoss, TheExampleOfTheHeader) {
  run_threads(2, [](DistributedManager& manager) {
    auto loss = torch::tensor(manager.rank() == 0 ? 2.0 : 6.0, torch::kDouble).requires_grad_();
    auto mean = mean_loss(loss, manager.rank() == 0 ? 3 : 1, manager.world());
    EXPECT_DOUBLE_EQ(mean.item<double>(), 3.0);
    mean.backward();
    EXPECT_DOUBLE_EQ(loss.grad().item<double>(), manager.rank() == 0 ? 1.5 : 0.5);
  });
}

TEST(MeanLoss, ABadWeightOfOneRankIsAnErrorOnAll) {
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    run_threads(3, [bad](DistributedManager& manager) {
      EXPECT_THROW(mean_loss(torch::zeros({}, torch::kDouble), manager.rank() == 1 ? bad : 2.0,
                             manager.world()),
                   InvalidArgument);
    });
  run_threads(2, [](DistributedManager& manager) {
    EXPECT_THROW(mean_loss(torch::zeros({}), 0, manager.world()), InvalidArgument);
  });
  EXPECT_THROW(mean_loss(torch::zeros({2}), 1, Group()), InvalidArgument);
  EXPECT_THROW(mean_loss(torch::zeros({}, torch::kLong), 1, Group()), InvalidArgument);
}

}  // namespace
}  // namespace tessera
