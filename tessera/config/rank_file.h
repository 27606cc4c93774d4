#pragma once
// Placements as the launchers' own files.

#include <string>
#include <vector>

#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// Open MPI (mpirun --rankfile): "rank 3=host1 slot=2", rank by rank. slot_of[r]: the slot of rank
/// r; slot N of a host is its N-th device.
std::string open_mpi_rank_file(const Topology& topology, const std::vector<int>& slot_of);

/// Slurm (SLURM_HOSTFILE and srun --distribution=arbitrary): one host a line, that of rank 0 first.
/// Slurm numbers the ranks of a host in their order, so a placement that has them on the devices in
/// another order cannot be said: see keeps_device_order().
std::string slurm_host_file(const Topology& topology, const std::vector<int>& slot_of);

/// On every host, higher ranks sit on higher devices.
bool keeps_device_order(const Topology& topology, const std::vector<int>& slot_of);

/// Reads either file back, for a mapping of the user's own: rank -> slot. In the second form, the
/// next free device of the host. Throws ConfigFileError with the line.
std::vector<int> parse_rank_file(const std::string& text, const Topology& topology,
                                 const std::string& source = "rank file");
std::vector<int> read_rank_file(const std::string& path, const Topology& topology);

}  // namespace tessera
