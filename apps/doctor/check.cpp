#include <ATen/Functions.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <optional>
#include <sstream>

#include "report.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/threads.h"
#include "tessera/launch/launch.h"
#include "tessera/launch/local_run.h"

namespace tessera::app {
namespace {

constexpr int check_ranks = 2;

// Over all ranks, whose sum is known.
void all_reduce(const Group& group) {
  const int size = group.size();
  const at::Tensor value = at::full({1000}, group.rank() + 1, at::kDouble);
  group.all_reduce(value);
  const double expected = size * (size + 1) / 2.0;
  if (!value.eq(expected).all().item<bool>()) {
    throw Error("the sum of ", size, " ranks is ", value[0].item<double>(), " and not ", expected);
  }
}

ManagerOptions check_options(const std::string& backend) {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = options.rendezvous_timeout = std::chrono::seconds(50);
  return options;
}

Group group_over(const DistributedManager& manager, const std::string& backend) {
  GroupOptions options;
  options.backend = backend;
  std::vector<int> all(static_cast<std::size_t>(manager.world_size()));
  std::iota(all.begin(), all.end(), 0);
  return manager.group(all, options);  // the world may be over a backend that is not to be had
}

std::optional<std::filesystem::path> in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  TextReader folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = std::filesystem::path(folder) / program;
    if (access(file.c_str(), X_OK) == 0) return file;
  }
  return std::nullopt;
}

// The command's output, should it fail, goes into the advice.
void run_ranks(Report& report, const std::string& name, const std::string& what, int ranks,
               const std::vector<std::string>& command) {
  std::FILE* output = std::tmpfile();
  if (!output) throw Error("cannot make a temporary file for a check's output");
  LocalRun run;
  run.command = command;
  run.ranks = ranks;
  run.timeout = 60;
  run.threads = 1;
  run.out = run.err = fileno(output);
  const LocalRunResult result = run_local(run);
  if (result.exit_status == 0) {
    report.line(name, concat("all-reduce on ", what, ": works"));
  } else {
    report.line(name, concat("all-reduce on ", what, ": FAILS (status ", result.exit_status, ")"));
    std::rewind(output);
    std::string text;
    for (int c; (c = std::fgetc(output)) != EOF && text.size() < 4000;)
      text += static_cast<char>(c);
    report.problem(concat("its output was:\n", text));
  }
  std::fclose(output);
}

std::string self() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

void check_threads(Report& report) {
  try {
    run_threads(check_ranks, [](DistributedManager& manager) { all_reduce(manager.world()); });
    report.line("threads", concat("all-reduce on ", check_ranks, " ranks: works"));
  } catch (const std::exception& error) {
    report.line("threads", "all-reduce: FAILS");
    report.problem(error.what());
  }
}

void check_mpi(Report& report) {
  if (!has_mpi()) {
    report.line("mpi", "not built, not checked");
    return;
  }
  const auto mpirun = in_path("mpirun");
  if (!mpirun) {
    report.line("mpi", "not checked");
    report.advice(
        "mpirun is not in PATH: install it (Debian: openmpi-bin), or run this check under your "
        "site's launcher: srun -n 2 tessera doctor --check");
    return;
  }
  // The inner launcher must be the one that is recognised, so the outer one's variables go.
  std::vector<std::string> command{"env"};
  for (const char* name :
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_SIZE",
        "TESSERA_NODE_RANK", "TESSERA_ADDRESS", "TESSERA_PORT", "TESSERA_SECRET", "RANK",
        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    command.insert(command.end(), {"-u", name});
  }
  // As root, Open MPI asks twice whether that is meant; for two ranks of this program it is. More
  // ranks than cores are meant too.
  command.insert(command.end(),
                 {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                  "OMPI_MCA_rmaps_base_oversubscribe=1",
                  "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe", mpirun->string(), "-n",
                  concat(check_ranks), self(), "--check-rank", "mpi"});
  run_ranks(report, "mpi", concat(check_ranks, " ranks under ", mpirun->string()), 1, command);
}

}  // namespace

void check_rank(const std::string& backend) {
  DistributedManager manager = DistributedManager::initialize(check_options(backend));
  all_reduce(manager.world());
  manager.shutdown();
}

void report_check(Report& report) {
  const Launch launch = detect_launch(Environment::of_process());
  report.section("Check");
  if (launch.world_size > 1) {
    std::vector<std::string> backends{"auto", "gloo", "shm"};
    // Open MPI ends a process that asks it for ranks that Slurm has not told it of.
    const bool told = launch.launcher == "open_mpi" || launch.launcher == "pmi" ||
                      std::getenv("PMIX_NAMESPACE") || std::getenv("PMI_RANK");
    if (has_mpi() && told) {
      backends.push_back("mpi");
    } else if (has_mpi() && launch.launcher == "slurm") {
      report.line("mpi", "not checked: this step tells MPI nothing of its ranks");
      report.advice(
          "to use MPI under srun, start the step with the interface that the MPI library was built "
          "for: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH (srun --mpi=list has those of "
          "this Slurm)");
    }
    DistributedManager manager =
        DistributedManager::initialize(check_options(has_mpi() && told ? "mpi" : "gloo"));
    for (const auto& backend : backends) {
      const std::string what =
          concat("all-reduce on the ", launch.world_size, " ranks of this launch: ");
      try {
        const Group group = group_over(manager, backend);
        all_reduce(group);
        report.line(backend, concat(what, "works"));
        if (backend == "auto")
          report.line("", concat("over ", group.backend(), ": ", group.backend_reason()));
      } catch (const NotAvailable& error) {
        report.line(backend, concat(what, "not to be had here"));
        report.advice(error.what());
      } catch (const std::exception& error) {
        report.line(backend, concat(what, "FAILS"));
        report.problem(error.what());
      }
    }
    manager.shutdown();
    return;
  }
  for (const char* backend : {"gloo", "shm"})
    run_ranks(report, backend, concat(check_ranks, " ranks of our launcher"), check_ranks,
              {self(), "--check-rank", backend});
  check_mpi(report);
  check_threads(report);
}

}  // namespace tessera::app
