#pragma once
// Mappings of ranks to slots in the launchers' own file formats.

#include <string>
#include <vector>

#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// Open MPI's rank file (mpirun --rankfile), one line per rank: "rank 3=host1 slot=2". slot_of[r]
/// is the slot of rank r; slot N of a host is its N-th device.
std::string open_mpi_rank_file(const Topology& topology, const std::vector<int>& slot_of);

/// Slurm's host file (SLURM_HOSTFILE and srun --distribution=arbitrary): one host per line, that of
/// rank 0 first. Slurm numbers the ranks of a host in their order, so a mapping that puts them on
/// the devices in another order cannot be expressed: see keeps_device_order().
std::string slurm_host_file(const Topology& topology, const std::vector<int>& slot_of);

/// True if on every host higher ranks are on higher devices.
bool keeps_device_order(const Topology& topology, const std::vector<int>& slot_of);

/// Reads either format back, as a mapping of the user's own: slot of each rank. In the second
/// format, a rank gets the next free device of the host. Throws ConfigFileError with the line.
std::vector<int> parse_rank_file(const std::string& text, const Topology& topology,
                                 const std::string& source = "rank file");
std::vector<int> read_rank_file(const std::string& path, const Topology& topology);

}  // namespace tessera
