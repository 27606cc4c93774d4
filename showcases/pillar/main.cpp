// pillar: waves in a channel with a pillar, by finite volumes on a mesh that gmsh made, in METIS's
// partition; a graph network trains on them while they run.
//
//   mpirun -n 3 pillar [WINDOWS [FOLDER [MESH]]]     goes on from the checkpoints in FOLDER
//   tessera report FOLDER                            draws the losses and checkpoints
//
// MPI is the solver's: main initialises and finalises it, the surrogate's messages go over a
// duplicate of the solver's communicator.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "surrogate.h"
#include "tessera/partition/partitioners.h"

namespace {

void run(std::int64_t windows, const std::string& folder, const std::string& mesh) {
  torch::set_num_threads(1);
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const pillar::Cells cells = pillar::read_cells(mesh);
  const auto owner = tessera::partition_by_metis(cells.size(), cells.source, cells.target, ranks);
  pillar::Waves solver(MPI_COMM_WORLD, cells, owner);
  const pillar::SolverMesh on(solver, cells);
  const bool first = on.manager.rank() == 0;
  if (first)
    std::cout << tessera::quality_of(owner, ranks, cells.source, cells.target).summary() << '\n';
  const auto watch = [&](std::int64_t window, double loss) {
    if (first && window % 20 == 19)
      std::printf("after %3lld windows: squared error %.4f of the change\n",
                  static_cast<long long>(window + 1), loss);
  };
  const auto score =
      pillar::train_online(solver, on, {.windows = windows, .folder = folder}, 5, watch);
  if (!first) return;
  std::printf(
      "RMS error of h a window ahead, over windows not trained on:\n"
      "  surrogate    %.2e\n  persistence  %.2e\n",
      score.surrogate, score.persistence);
  std::printf("water: %.12g before, %.12g after\n", score.mass_before, score.mass_after);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    run(argc > 1 ? std::atoi(argv[1]) : 120, argc > 2 ? argv[2] : "",
        argc > 3 ? argv[3] : PILLAR_MESH);
  } catch (const std::exception& error) {
    std::cerr << "pillar: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
