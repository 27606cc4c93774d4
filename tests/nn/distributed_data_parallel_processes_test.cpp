// Every rank a process, over the default backend.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "data_parallel_case.h"
#include "tessera/comm/job/manager.h"

namespace tessera {
namespace {

TEST(DistributedDataParallelProcesses, UnevenTrainingEqualsOneProcess) {
  auto manager = DistributedManager::initialize();
  for (const bool shared : {false, true}) {
    const auto reference = testing::one_process(shared);
    for (const bool overlap : {true, false})
      for (const std::int64_t bytes : {1l, 1l << 20})
        testing::train_and_compare(manager.world(), {.reducer = {bytes, bytes, overlap}}, shared,
                                   reference);
  }
  manager.shutdown();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
