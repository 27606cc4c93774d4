#pragma once
// A communicator of the caller as the ranks of a job.

#include "tessera/comm/job/manager.h"

namespace tessera::c {

/// Makes the ranks of the job those of a communicator, given by its handle in Fortran, with a store
/// besides, so that ranks learn of each other's mistakes: the first rank's address, port and secret
/// go over MPI. Collective over the communicator. Throws NotAvailable without the MPI part.
void join_mpi(int communicator, ManagerOptions& options);

}  // namespace tessera::c
