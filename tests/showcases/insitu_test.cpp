// The in-situ example: the solver's memory is not copied, its physics does not notice, and what is
// learnt does not depend on the number of ranks.

#include <gtest/gtest.h>

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
