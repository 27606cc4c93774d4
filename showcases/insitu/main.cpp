// insitu: a shallow-water solver written against plain MPI trains a surrogate of itself while it
// runs.
//
//   mpirun -n 4 insitu [ROWS COLUMNS [FOLDER]]     goes on from the checkpoints in FOLDER
//
// MPI is the solver's: main initialises and finalises it, the surrogate's messages go over a
// duplicate of the solver's communicator.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "shallow_water.h"
#include "surrogate.h"

namespace {

void run(std::int64_t rows, std::int64_t columns, const std::string& folder) {
  torch::set_num_threads(1);
  insitu::ShallowWater solver(MPI_COMM_WORLD, rows, columns);
  const insitu::SolverMesh on(solver);
  const bool first = on.manager.rank() == 0;
  if (first)
    std::cout << "solver: " << rows << " x " << columns << " cells on " << solver.grid()[0] << " x "
              << solver.grid()[1] << " ranks; " << on.spec << '\n';
  const insitu::Training training{.folder = folder};
  const auto watch = [&](std::int64_t window, double loss) {
    if (first && window % 10 == 9)
      std::printf("after %3lld windows: squared error %.4f of the change\n",
                  static_cast<long long>(window + 1), loss);
  };
  const auto score = insitu::train_online(solver, on, training, 5, watch);
  if (!first) return;
  std::printf(
      "RMS error of h after %lld solver steps, over windows not trained on:\n  surrogate    %.2e\n "
      " persistence  %.2e\n",
      static_cast<long long>(training.steps_a_window), score.surrogate, score.persistence);
  std::printf("mass of the solver: %.12g before, %.12g after\n", score.mass_before,
              score.mass_after);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    run(argc > 1 ? std::atoi(argv[1]) : 48, argc > 2 ? std::atoi(argv[2]) : 64,
        argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::cerr << "insitu: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
