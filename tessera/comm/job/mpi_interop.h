#pragma once
// For programs that use MPI themselves: groups over a communicator of the program.
//
//   MPI_Comm_split(MPI_COMM_WORLD, is_solver, 0, &solver);        // the program's own MPI
//   auto mpi = tessera::mpi_world(solver);  // duplicated: its messages never meet the program's
//   // its world is the ranks of `solver`
//   auto manager = DistributedManager::initialize({.mpi = mpi});

#include <mpi.h>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/job/manager.h"

namespace tessera {

/// The ranks of `communicator`, which is duplicated (collective over it) and stays the caller's.
/// MPI must be initialised, and is never finalised here; the last copy of the world and every group
/// made from it must be gone before the caller finalises MPI. Throws InvalidArgument for
/// MPI_COMM_NULL, an intercommunicator, or an MPI that is not initialised or already finalised.
MpiWorld mpi_world(MPI_Comm communicator);

}  // namespace tessera
