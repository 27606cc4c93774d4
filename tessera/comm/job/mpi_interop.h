#pragma once
// For programs that use MPI themselves: groups over a communicator of the program.
//
//   MPI_Comm_split(MPI_COMM_WORLD, is_solver, 0, &solver);        // the program's own MPI
//   auto mpi = tessera::mpi_world(solver);  // duplicated: its messages never meet the program's
//   // its world is the ranks of `solver`
//   auto manager = DistributedManager::initialize({.mpi = mpi});

#include <mpi.h>

#include <chrono>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/job/manager.h"

namespace tessera {

/// The ranks of `communicator`, which is duplicated (collective over it) and stays the caller's.
/// MPI must be initialised, and is never finalised here; the last copy of the world and every group
/// made from it must be gone before the caller finalises MPI. Compiled with the caller's MPI, which
/// must be that of libtessera_mpi.so. Throws InvalidArgument for MPI_COMM_NULL, an
/// intercommunicator, or an MPI that is not initialised or already finalised; TimeoutError where
/// not all ranks come within `limit`.
inline MpiWorld mpi_world(MPI_Comm communicator, std::chrono::milliseconds limit = kDefaultLimit) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  // Otherwise MPI ends the process at the next line; the call refuses.
  const bool usable = initialised && !finalised;
  return MpiWorld::of_communicator(usable ? static_cast<int>(MPI_Comm_c2f(communicator)) : 0,
                                   limit);
}

}  // namespace tessera
