#include <mpi.h>

#include "tessera/base/text.h"
#include "tessera/comm/detail/manager_state.h"
#include "tessera/comm/mpi_interop.h"

namespace tessera {

DistributedManager mpi_manager(MPI_Comm communicator, const ManagerOptions& options) {
  if (!options.backend.empty() && options.backend != "mpi")
    throw InvalidArgument(concat("mpi_manager() was given the backend '", options.backend, "'; its groups are over MPI"));
  detail::ManagerBase base;
  base.options = options;
  base.backend = "mpi";
  base.mpi = std::make_shared<MpiWorld>(mpi_world(communicator));
  base.launch.launcher = "code";
  base.launch.rank = base.mpi->rank();
  base.launch.world_size = base.mpi->size();
  MPI_Comm host = MPI_COMM_NULL;
  if (MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, base.launch.rank, MPI_INFO_NULL, &host) != MPI_SUCCESS)
    throw CommError("mpi_manager(): MPI_Comm_split_type failed");
  MPI_Comm_rank(host, &base.launch.local_rank);
  MPI_Comm_size(host, &base.launch.local_size);
  MPI_Comm_free(&host);
  base.launch.node_rank = -1;
  return DistributedManager(std::make_shared<detail::ManagerState>(std::move(base)));
}

}  // namespace tessera
