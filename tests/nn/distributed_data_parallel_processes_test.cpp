// Every rank a process, over the default backend.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "data_parallel_case.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {
namespace {

// The module's output becomes one sharded tensor: its gradients are summed. Rank r has 2 r rows.
void beside_sharded_tensors(DistributedManager& manager) {
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"data", ranks}});
  Sizes rows(ranks);
  for (int r = 0; r < ranks; ++r) rows[r] = ranks == 1 ? 2 : 2 * r;
  const std::int64_t total = ranks == 1 ? 2 : ranks * (ranks - 1), begin = rank * (rank - 1);
  const auto make = [] {
    torch::manual_seed(4);
    torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
    net->to(torch::kDouble);
    return net;
  };
  auto net = make(), expected = make();
  DistributedDataParallel ddp(net, manager.world(), {.reduction = ReduceOp::sum});
  for (int step = 0; step < 3; ++step) {
    const auto x = testing::samples(step, total), mine = x.narrow(0, begin, rows[rank]);
    expected->forward(x).square().mean().backward();
    const auto scope = step == 1 ? std::optional(no_sync(*net)) : std::nullopt;
    from_local(ddp(mine), mesh, {Shard(0)}, {{0, rows}}).square().mean().backward();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), expected->parameters()[i].grad(),
                                1e-11, 1e-11))
        << i;
}

TEST(DistributedDataParallelProcesses, UnevenTrainingEqualsOneProcess) {
  auto manager = DistributedManager::initialize();
  for (const bool shared : {false, true}) {
    const auto reference = testing::one_process(shared);
    for (const bool overlap : {true, false})
      for (const std::int64_t bytes : {1l, 1l << 20})
        testing::train_and_compare(manager.world(), {.reducer = {bytes, bytes, overlap}}, shared,
                                   reference);
  }
  beside_sharded_tensors(manager);
  testing::keep_an_old_wrapper(manager);
  manager.shutdown();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
