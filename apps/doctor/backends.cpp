#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <string>

#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/threads.h"

namespace tessera::app {
namespace {

std::string library_of(const void* address) {
  Dl_info info{};
  if (!address || !dladdr(address, &info) || !info.dli_fname) return "unknown";
  std::error_code error;
  const auto path = std::filesystem::weakly_canonical(info.dli_fname, error);
  return error ? info.dli_fname : path.string();
}

int gpus_of_the_system() {
  std::error_code error;
  int count = 0;
  for (std::filesystem::directory_iterator it("/proc/driver/nvidia/gpus", error), end;
       !error && it != end; it.increment(error))
    ++count;
  return count;
}

void report_mpi(Report& report) {
  if (!has_mpi()) {
    try {
      mpi_library();
    } catch (const NotAvailable& error) {
      report.line("mpi", "not there");
      report.advice(error.what());
    }
    return;
  }
  report.line("mpi", concat("built: ", mpi_library()));
  report.line("", library_of(dlsym(RTLD_DEFAULT, "MPI_Get_library_version")));
}

// Two ranks of this process meet as two processes would.
void report_shm(Report& report) {
  ManagerOptions options;
  options.backend = "auto";
  options.timeout = std::chrono::seconds(20);
  std::string backend, reason;
  try {
    run_threads(
        2,
        [&](DistributedManager& manager) {
          const Group world = manager.world();
          world.barrier();
          if (manager.rank() != 0) return;
          backend = world.backend();
          reason = world.backend_reason();
        },
        options);
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (backend == "shm") {
    report.line("shm", "built; ranks of one host, through memory");
    return;
  }
  report.line("shm", "built, but not usable here: groups of backend auto use gloo");
  report.advice(reason);
}

// Three answers: not built, built and usable, and built but unusable here, with the reason.
void report_nccl(Report& report) {
  const int gpus = gpus_of_the_system();
  const auto part = nccl_part();
  if (!part.built) {
    report.line("nccl", "not built");
    if (gpus > 0)
      report.advice(
          "GPUs are there, but this build has no NCCL part: configure again with "
          "-DTESSERA_NCCL=ON, where a CUDA toolkit and nccl.h are");
    return;
  }
  if (!part.problem.empty()) {
    report.line("nccl", "built, but not usable");
    if (gpus > 0)
      report.problem(part.problem);
    else
      report.advice(part.problem);
    return;
  }
  report.line("nccl", concat("built: ", nccl_version()));
  if (gpus == 0) report.advice("no GPU: the NCCL backend has nothing to work on");
}

}  // namespace

void report_libraries(Report& report) {
  report.section("libtorch");
  report.line("version",
              concat(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR, ".", TORCH_VERSION_PATCH));
  report.line("library", library_of(reinterpret_cast<const void*>(&at::get_num_threads)));
  report.line("threads", concat(at::get_num_threads(), " inside an operator (OMP_NUM_THREADS)"));
  report.line("devices", concat("cpu", at::hasCUDA() ? ", cuda" : "",
                                "; GPUs that the system shows: ", gpus_of_the_system()));

  report.section("Backends");
  report.line("gloo", "built (part of libtorch); TCP");
  report_shm(report);
  report_mpi(report);
  report.line("hosts", concat("built; memory inside a host, gloo between hosts",
                              has_mpi() ? ", or mpi (ManagerOptions::between_hosts)" : ""));
  report_nccl(report);
  report.line("threads", "built; ranks as threads of one process, for tests");
}

}  // namespace tessera::app
