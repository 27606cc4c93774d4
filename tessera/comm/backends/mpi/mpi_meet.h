#pragma once
// How the members of a new MPI group meet.

#include <memory>
#include <vector>

#include "tessera/comm/backends/mpi/mpi_attempt.h"
#include "tessera/comm/backends/mpi/mpi_work.h"

namespace tessera::detail {

/// Makes the communicator of `ranks` of the context, in this order; called by its members alone.
/// MPI_Comm_create_group has no time limit, so the members first report to the group's first rank
/// by messages, which have one. Throws InvalidArgument, and TimeoutError naming the ranks that did
/// not come, or PeerLostError if the attempt is given up.
std::shared_ptr<MpiComm> make_mpi_comm(const std::shared_ptr<MpiContext>& context,
                                       const std::vector<int>& ranks,
                                       const MpiBackendOptions& options,
                                       const MpiAttempt& attempt = {});

}  // namespace tessera::detail
