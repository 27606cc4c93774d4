// Parallelism of every kind over MPI, whose communicator is the program's: equal to one process,
// saved in the background and gone on from. Run under the MPI library's own launcher.

#include <mpi.h>
#include <unistd.h>

#include <filesystem>

#include "placed_cases.h"
#include "tessera/comm/job/mpi_interop.h"

namespace tessera::test {

namespace {

// The same folder for all ranks, gone at the end.
class SharedFolder {
 public:
  SharedFolder() {
    int process = static_cast<int>(::getpid());
    MPI_Bcast(&process, 1, MPI_INT, 0, MPI_COMM_WORLD);
    path_ = concat(::testing::TempDir(), "tessera_train_mpi_", process);
  }
  ~SharedFolder() {
    MPI_Barrier(MPI_COMM_WORLD);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

DistributedManager manager_of(MPI_Comm communicator) {
  ManagerOptions options;
  options.mpi = mpi_world(communicator);
  options.timeout = std::chrono::seconds(30);
  return DistributedManager::initialize(options);
}

}  // namespace

TEST(TrainMpi, EveryKindOfParallelismEqualsOneProcess) {
  auto manager = manager_of(MPI_COMM_WORLD);
  each_strategy_case(manager);
  mixed_case(manager);
  batch_fields_case(manager);
  const SharedFolder folder;
  table_case(manager, folder.path(), manager.world_size(), false);
  table_case(manager, folder.path(), manager.world_size(), true);
}

// The thread writes, and the next call commits.
TEST(TrainMpi, SavesInTheBackgroundAndGoesOnBitByBit) {
  auto manager = manager_of(MPI_COMM_WORLD);
  const SharedFolder folder;
  const auto run = [&](const std::string& path, std::int64_t steps) {
    Regression task;
    auto options = with(std::make_shared<DDPStrategy>(manager), 2);
    options.max_steps = steps;
    options.checkpoint.folder = path;
    options.checkpoint.resume = true;
    options.callbacks = {std::make_shared<CheckpointCallback>(
        CheckpointCallbackOptions{.every_steps = 1, .keep_last = 2, .at_end = false})};
    const FitResult result = Trainer(options).fit(task, ragged_batches(manager.rank(), 5));
    EXPECT_EQ(result.steps, steps < 0 ? 6 : steps);
    return task.values();
  };
  const auto expected = run(folder.path() + "/full", -1);
  for (const std::int64_t steps : {1, 3, 4}) run(folder.path() + "/parts", steps);
  expect_equal(run(folder.path() + "/parts", -1), expected, "gone on");
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  MPI_Init(&argc, &argv);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
