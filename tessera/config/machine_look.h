#pragma once
// How the ranks of a job look at their machines, for find_topology() (tessera/comm/job):
//
//   const FoundTopology found = find_topology(manager, machine_look());

#include <string>

#include "tessera/mesh/mapping/found_topology.h"

namespace tessera {

/// Where ranks look. Rank 0's count.
struct MachineSources {
  /// A topology in a file, as `tessera bench topology` measures it, which rank 0 reads; empty:
  /// found as below.
  std::string file = {};
  /// Slurm's tree of switches (tree plugin), which rank 0 reads; where there is no such file, none
  /// is known.
  std::string slurm = "/etc/slurm/topology.conf";
};

/// A look at the inside of each host with hwloc (of its GPUs, packages and NUMA nodes the first
/// kind of which there are as many as ranks, else equal shares of its cores: which are near each
/// other, and the adapter next to each) and at Slurm's switches above the hosts; or a file in place
/// of both. The hosts of a file are found by their names; where those are none of the job's, rank r
/// is taken to run on slot r, which `unknown` says. What cannot be read of a host or of Slurm is
/// unknown too. find_topology() throws ConfigurationError for a file that cannot be read, and
/// MappingError for one that has another number of slots than the job has ranks.
MachineLook machine_look(const MachineSources& sources = {});

}  // namespace tessera
