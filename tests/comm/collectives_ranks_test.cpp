// The same collectives between real processes, as a launcher starts them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "collectives_cases.h"
#include "tessera/comm/job/manager.h"

namespace tessera {
namespace {

TEST(CollectivesOfProcesses, EqualTheReference) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.timeout = std::chrono::seconds(60);
  auto manager = DistributedManager::initialize(options);
  for (const char* backend : {"gloo", "shm"}) {
    GroupOptions over;
    over.backend = backend;
    const auto world = manager.group(manager.world().ranks(), over);
    testing_cases::check_everything(world, testing_cases::all_dtypes());
    if (manager.world_size() < 2) return;
    EXPECT_EQ(world.backend(), backend);
    // A group of some ranks, in an order of its own.
    std::vector<int> ranks;
    for (int r = manager.world_size() - 1; r >= 0; r -= 2) ranks.push_back(r);
    if (std::ranges::find(ranks, manager.rank()) != ranks.end())
      testing_cases::check_everything(manager.group(ranks, over), {torch::kFloat, torch::kLong});
    world.barrier();
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
