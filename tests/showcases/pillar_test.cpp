// The example pillar: cells of a mesh that gmsh made, in METIS's partition; the solver does not
// notice, and what is learnt does not depend on the number of ranks.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>

#include "surrogate.h"
#include "tessera/base/error.h"
#include "tessera/partition/partitioners.h"
#include "tessera/tensor/shard_tensor.h"

namespace pillar {
namespace {

const Cells& mesh_of_cells() {
  static const Cells cells = read_cells(PILLAR_MESH);
  return cells;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return size;
}

// METIS's; where Tessera has been built without it, cells in turn.
std::vector<int> owners(const Cells& cells, int ranks) {
  try {
    return tessera::partition_by_metis(cells.size(), cells.source, cells.target, ranks);
  } catch (const tessera::NotAvailable&) {
    std::vector<int> owner(static_cast<std::size_t>(cells.size()));
    for (std::size_t c = 0; c < owner.size(); ++c) owner[c] = static_cast<int>(c) % ranks;
    return owner;
  }
}

// A solver on its own ranks and the mesh of them.
struct Job {
  explicit Job(MPI_Comm comm, const Cells& cells = mesh_of_cells())
      : solver(comm, cells, owners(cells, size_of(comm))), on(solver, cells) {}
  Score train(const Training& training,
              const std::function<void(std::int64_t, double)>& watch = {}) {
    return train_online(solver, on, training, 2, watch);
  }
  Waves solver;
  SolverMesh on;
};

std::string shared_folder() {
  int process = static_cast<int>(::getpid());
  MPI_Bcast(&process, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return ::testing::TempDir() + "tessera_pillar_" + std::to_string(process);
}

void expect_from(const Score& got, const Score& whole, std::size_t from) {
  ASSERT_EQ(got.losses.size() + from, whole.losses.size());
  for (std::size_t i = 0; i < got.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], whole.losses[from + i], 1e-8 * whole.losses[from + i]) << i;
  EXPECT_NEAR(got.surrogate, whole.surrogate, 1e-9);
}

TEST(Pillar, TheMeshIsClosed) {
  const Cells& cells = mesh_of_cells();
  EXPECT_EQ(cells.size(), 1305);
  // The channel without its pillar, which has corners.
  EXPECT_NEAR(std::accumulate(cells.area.begin(), cells.area.end(), 0.0), 2 - 0.0616, 1e-3);
  std::vector<std::array<double, 2>> sum(cells.area.size());
  for (const Face& face : cells.faces)
    for (int d = 0; d < 2; ++d) {
      sum[face.left][d] += face.normal[d];
      if (face.right >= 0) sum[face.right][d] -= face.normal[d];
    }
  for (const auto& normal : sum) EXPECT_NEAR(std::hypot(normal[0], normal[1]), 0, 1e-12);
}

TEST(Pillar, AFileThatIsNoMeshIsRefused) {
  const std::string path = ::testing::TempDir() + "tessera_no_mesh_" + std::to_string(::getpid());
  for (const char* text : {"", "$MeshFormat\n4.1 0 8\n", "$Nodes\n3\n1 0 0",
                           "$Elements\n1\n1 2 0 1 2 3\n", "$Elements\n1\n1 15 0 1\n"}) {
    std::ofstream(path) << text;
    EXPECT_THROW(read_cells(path), std::runtime_error) << text;
  }
  std::filesystem::remove(path);
  EXPECT_THROW(read_cells(path), std::runtime_error);
}

TEST(Pillar, TheTensorIsTheSolversMemory) {
  Job job(MPI_COMM_WORLD);
  const at::Tensor state = job.on.view(job.solver);
  EXPECT_EQ(tessera::to_local(state).data_ptr(), job.solver.state());
  const double before = state.select(1, 1).abs().sum().item<double>();
  job.solver.step();
  EXPECT_NE(state.select(1, 1).abs().sum().item<double>(), before);
}

TEST(Pillar, SolverAndSurrogateAreThoseOfOneRank) {
  const Training training{.windows = 4, .steps_a_window = 3, .updates = 2};
  Job many(MPI_COMM_WORLD), one(MPI_COMM_SELF);
  const Score a = many.train(training), b = one.train(training);
  expect_from(a, b, 0);
  EXPECT_NEAR(a.mass_after, a.mass_before, 1e-12);
  EXPECT_NEAR(a.mass_after, b.mass_after, 1e-12);
  const at::Tensor alone = tessera::to_local(one.on.view(one.solver));
  const at::Tensor own = torch::tensor(many.solver.owned(), torch::kLong);
  EXPECT_TRUE(torch::allclose(tessera::to_local(many.on.view(many.solver)),
                              alone.index_select(0, own), 1e-12, 1e-13));
}

// Ended in the middle of a window, and gone on with: by the same ranks, and by one alone, whose
// partition is another.
TEST(Pillar, GoesOnFromACheckpointOnAnyRanks) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Training training{.windows = 6, .steps_a_window = 2, .updates = 2};
  const Score expected = Job(MPI_COMM_WORLD).train(training);
  training.folder = shared_folder();
  training.save_every = 2;
  struct Killed {};
  const auto killed = [](std::int64_t window, double) {
    if (window == 2) throw Killed();
  };
  EXPECT_THROW(Job(MPI_COMM_WORLD).train(training, killed), Killed);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    expect_from(Job(MPI_COMM_SELF).train(training), expected, 4);
    std::ifstream log(training.folder + "/metrics.jsonl");
    std::string line;
    int lines = 0;
    while (std::getline(log, line)) lines += line.find("train/loss") != std::string::npos;
    EXPECT_EQ(lines, 6);
    std::filesystem::remove_all(training.folder + "/window-6");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  // What one rank has saved after the fourth window.
  expect_from(Job(MPI_COMM_WORLD).train(training), expected, 8);

  // The same cells, of which one is larger; and fewer.
  Cells other = mesh_of_cells();
  other.area[5] *= 1.5;
  EXPECT_THROW(Job(MPI_COMM_WORLD, other).train(training), tessera::Error);
  EXPECT_EQ(Job(MPI_COMM_WORLD).train(training).losses.size(), 0u);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::filesystem::remove_all(training.folder);
}

TEST(Pillar, TheSurrogateBeatsPersistence) {
  const Score score = Job(MPI_COMM_WORLD).train({.windows = 40, .learning_rate = 1e-2});
  EXPECT_LT(score.surrogate, 0.6 * score.persistence);
}

}  // namespace
}  // namespace pillar

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  MPI_Init(&argc, &argv);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
