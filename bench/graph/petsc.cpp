// An exchange of ghosts, forward and reverse, beside PETSc's own of the same ghosts: VecScatter of
// the owned rows to owned rows and ghosts, which is what ghost_exchange() gives, and back, added.
// PETSc's messages are MPI's. Under MPI's launcher on two ranks: ours over MPI, or through memory.

#include <petscvec.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "backend.h"
#include "cut_graph.h"
#include "device.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/ops/ghosts/ghost_plan.h"

namespace {

using tessera::bench::seconds_of;

void check(PetscErrorCode code) {
  if (code != 0) throw tessera::Error(tessera::concat("PETSc's error ", code));
}

struct Petsc {
  Petsc() { check(PetscInitializeNoArguments()); }
  ~Petsc() { PetscFinalize(); }
  Petsc(const Petsc&) = delete;
  Petsc& operator=(const Petsc&) = delete;
};

// Rows of so many features, those of this rank and then its ghosts.
struct PetscGhosts {
  Vec owned = nullptr, local = nullptr;
  VecScatter scatter = nullptr;
  PetscGhosts(const std::vector<std::int64_t>& rows, std::int64_t own, std::int64_t features) {
    const auto width = static_cast<PetscInt>(features);
    const auto all = static_cast<PetscInt>(rows.size());
    const std::vector<PetscInt> from(rows.begin(), rows.end());
    IS is_from = nullptr, is_to = nullptr;
    check(VecCreateMPI(PETSC_COMM_WORLD, static_cast<PetscInt>(own) * width, PETSC_DETERMINE,
                       &owned));
    check(VecCreateSeq(PETSC_COMM_SELF, all * width, &local));
    check(ISCreateBlock(PETSC_COMM_SELF, width, all, from.data(), PETSC_COPY_VALUES, &is_from));
    check(ISCreateStride(PETSC_COMM_SELF, all * width, 0, 1, &is_to));
    check(VecScatterCreate(owned, is_from, local, is_to, &scatter));
    check(ISDestroy(&is_from));
    check(ISDestroy(&is_to));
  }
  ~PetscGhosts() {
    VecScatterDestroy(&scatter);
    VecDestroy(&local);
    VecDestroy(&owned);
  }
  PetscGhosts(const PetscGhosts&) = delete;
  PetscGhosts& operator=(const PetscGhosts&) = delete;

  void forward() const {
    check(VecScatterBegin(scatter, owned, local, INSERT_VALUES, SCATTER_FORWARD));
    check(VecScatterEnd(scatter, owned, local, INSERT_VALUES, SCATTER_FORWARD));
  }
  void reverse() const {
    check(VecZeroEntries(owned));
    check(VecScatterBegin(scatter, local, owned, ADD_VALUES, SCATTER_REVERSE));
    check(VecScatterEnd(scatter, local, owned, ADD_VALUES, SCATTER_REVERSE));
  }
  // A copy of a Vec's values as rows.
  static at::Tensor rows_of(Vec v, std::int64_t features) {
    PetscInt n = 0;
    PetscScalar* values = nullptr;
    check(VecGetLocalSize(v, &n));
    check(VecGetArray(v, &values));
    at::Tensor rows = at::from_blob(values, {n / features, features}, at::kDouble).clone();
    check(VecRestoreArray(v, &values));
    return rows;
  }
  static void fill(Vec v, const at::Tensor& rows) {
    PetscScalar* values = nullptr;
    check(VecGetArray(v, &values));
    at::from_blob(values, rows.sizes(), at::kDouble).copy_(rows);
    check(VecRestoreArray(v, &values));
  }
};

struct Options {
  std::string backend = "mpi";
  tessera::bench::Output output{.shared = true};
  std::vector<std::int64_t> edges{10'000, 100'000, 1'000'000}, features{1, 32};
};

// The rows of the whole that a rank's local array has: its own, and its ghosts in ascending order,
// as a solver has them.
std::vector<std::int64_t> local_array(const tessera::bench::CutGraph& graph, int rank) {
  const std::int64_t own = graph.sizes[rank], begin = rank == 0 ? 0 : graph.sizes[0];
  std::vector<std::int64_t> rows(static_cast<std::size_t>(own));
  std::iota(rows.begin(), rows.end(), begin);
  // By target, so many each.
  const at::Tensor sources =
      graph.edges.select(0, 0)
          .narrow(0, begin * tessera::bench::kNeighbors, own * tessera::bench::kNeighbors)
          .contiguous();
  auto ghosts = tessera::ghosts_of(
      rows, {sources.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(sources.numel())});
  std::ranges::sort(ghosts);
  rows.insert(rows.end(), ghosts.begin(), ghosts.end());
  return rows;
}

int run(const Options& o) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = o.backend;
  auto manager = tessera::DistributedManager::initialize(options);
  const Petsc petsc;
  int ranks = 0;
  MPI_Comm_size(PETSC_COMM_WORLD, &ranks);
  if (manager.world_size() != 2 || ranks != 2)
    throw tessera::InvalidArgument(
        tessera::concat("bench_graph_petsc runs on 2 ranks of MPI's launcher; there are ", ranks));
  const auto world = manager.world();
  const auto both = manager.mesh({{"domain", 2}});
  const auto alone = manager.mesh(tessera::Mesh({{"alone", 1}}, {manager.rank()}));
  tessera::bench::Report report("graph", o.output, manager.rank());
  const double at_most = o.backend == "mpi" ? 1.2 : 0.5;
  for (const std::int64_t count : o.edges) {
    const tessera::bench::CutGraph graph(alone, count);
    const auto rows = local_array(graph, manager.rank());
    const std::int64_t own = graph.sizes[manager.rank()];
    const std::span<const std::int64_t> all = rows;
    const tessera::GhostPlan plan(both, all.first(own), all.subspan(own));
    for (const std::int64_t features : o.features) {
      const PetscGhosts theirs(rows, own, features);
      const at::Tensor x = at::rand({own, features}, at::kDouble);
      const at::Tensor y = tessera::ghost_exchange(plan, x);
      PetscGhosts::fill(theirs.owned, x);
      theirs.forward();
      bool same = PetscGhosts::rows_of(theirs.local, features).equal(y);
      const at::Tensor back = tessera::ghost_reduce(plan, y);
      theirs.reverse();
      same &= PetscGhosts::rows_of(theirs.owned, features).equal(back);
      if (!same) throw tessera::Error("PETSc has exchanged other rows");
      const auto measure = [&](const char* what, const auto& ours, const auto& reference) {
        const std::string name = tessera::concat(what, " E=", count, " ghosts=", rows.size() - own,
                                                 " x", features, ' ', world.backend());
        if (!report.wants(name)) return;
        const int repeats = static_cast<int>(std::max<std::int64_t>(1, 1'000'000 / count / 2));
        report.time(name,
                    tessera::bench::alternate(
                        61, [&] { return seconds_of(world, repeats, ours); },
                        [&] { return seconds_of(world, repeats, reference); }),
                    "VecScatter", at_most);
      };
      measure("forward", [&] { tessera::ghost_exchange(plan, x); }, [&] { theirs.forward(); });
      measure("reverse", [&] { tessera::ghost_reduce(plan, y); }, [&] { theirs.reverse(); });
    }
  }
  world.barrier();
  return manager.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("An exchange of ghosts on two ranks beside PETSc's VecScatter");
  Options o;
  tessera::bench::add_backend(app, o.backend);
  tessera::bench::add_output(app, o.output);
  app.add_option("--edges", o.edges, "numbers of edges")->capture_default_str();
  app.add_option("--features", o.features, "numbers of a row")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::guarded("bench_graph_petsc", [&] { return run(o); });
}
