// The in-situ example: the solver's memory is not copied, its physics does not notice, and what is
// learnt does not depend on the number of ranks.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "surrogate.h"
#include "tessera/tensor/shard_tensor.h"

namespace insitu {
namespace {

TEST(InSitu, TheTensorIsTheSolversMemory) {
  ShallowWater solver(MPI_COMM_WORLD, 20, 18);
  const SolverMesh on(solver);
  const at::Tensor state = on.view(solver);
  EXPECT_EQ(tessera::to_local(state).data_ptr(), solver.state());
  EXPECT_NEAR(state.select(1, 0).sum().item<double>(), solver.mass(), 1e-9);
  const double before = state.select(1, 1).abs().sum().item<double>();
  solver.step();
  EXPECT_NE(state.select(1, 1).abs().sum().item<double>(), before);  // the tensor sees the step
}

TEST(InSitu, SolverAndSurrogateAreThoseOfOneRank) {
  const Training training{.windows = 6, .steps_a_window = 3, .updates = 2};
  ShallowWater many(MPI_COMM_WORLD, 20, 18), one(MPI_COMM_SELF, 20, 18);
  const SolverMesh on_many(many), on_one(one);
  const Score a = train_online(many, on_many, training, 2),
              b = train_online(one, on_one, training, 2);
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (std::size_t i = 0; i < a.losses.size(); ++i)
    EXPECT_NEAR(a.losses[i], b.losses[i], 1e-9 * b.losses[i]) << "update " << i;
  EXPECT_NEAR(a.surrogate, b.surrogate, 1e-9);
  EXPECT_NEAR(a.mass_after, a.mass_before, 1e-9 * a.mass_before);
}

// Stopped in the middle and gone on with: the same on the same ranks, and on one rank alone.
TEST(InSitu, GoesOnFromACheckpointOnAnyRanks) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int process = static_cast<int>(::getpid());
  MPI_Bcast(&process, 1, MPI_INT, 0, MPI_COMM_WORLD);
  const std::string folder = ::testing::TempDir() + "tessera_insitu_" + std::to_string(process);
  Training training{.windows = 6, .steps_a_window = 3, .updates = 2};
  ShallowWater straight(MPI_COMM_WORLD, 20, 18);
  const Score expected = train_online(straight, SolverMesh(straight), training, 2);
  training.folder = folder;
  training.save_every = 2;
  const auto run = [&](MPI_Comm comm, std::int64_t windows) {
    training.windows = windows;
    ShallowWater solver(comm, 20, 18);
    return train_online(solver, SolverMesh(solver), training, 2);
  };
  EXPECT_EQ(run(MPI_COMM_WORLD, 3).losses.size(), 6u);
  for (const bool alone : {false, true}) {
    MPI_Barrier(MPI_COMM_WORLD);
    if (alone && rank > 0) break;
    // The one of the third window, after which nothing else was saved.
    const Score score = run(alone ? MPI_COMM_SELF : MPI_COMM_WORLD, alone ? 6 : 5);
    EXPECT_EQ(score.losses.size(), alone ? 2u : 4u);
    const std::size_t from = alone ? 10 : 6;
    for (std::size_t i = 0; i < score.losses.size(); ++i)
      EXPECT_NEAR(score.losses[i], expected.losses[from + i], 1e-9 * expected.losses[from + i])
          << i;
    if (alone) {
      EXPECT_NEAR(score.surrogate, expected.surrogate, 1e-9);
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::filesystem::remove_all(folder);
}

TEST(InSitu, TheSurrogateBeatsPersistence) {
  ShallowWater solver(MPI_COMM_WORLD, 24, 24);
  const SolverMesh on(solver);
  const Score score = train_online(solver, on, {.windows = 30}, 3);
  EXPECT_LT(score.surrogate, 0.6 * score.persistence);
}

}  // namespace
}  // namespace insitu

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  MPI_Init(&argc, &argv);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
