#include "tessera/base/error.h"
#include "tessera/c/detail/mpi_start.h"

namespace tessera::c {

void join_mpi(int /*communicator*/, ManagerOptions& /*options*/) {
  throw NotAvailable(
      "this build has no MPI part: build Tessera where CMake finds MPI, or start by "
      "tessera_start()");
}

}  // namespace tessera::c
