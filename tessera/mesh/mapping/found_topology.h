#pragma once
// FoundTopology: the machines of a running job, as its ranks have found them, and where each rank
// sits. find_topology() in tessera/comm/job/find_topology.h makes one.

#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

struct FoundTopology {
  /// Has a slot for each rank of the job.
  Topology topology;
  /// The slot of each rank. Launchers that deal ranks to hosts in turn leave rank r elsewhere than
  /// on slot r.
  std::vector<int> slot_of;
  /// What could not be found, one sentence each; there the topology has its defaults.
  std::vector<std::string> unknown;

  /// The rank to put at each row-major position of a mesh over the whole job, so that a mapping
  /// holds: Mesh(axes, found.ranks(mapping)). Throws MappingError for another number of positions.
  std::vector<int> ranks(const RankMapping& mapping) const;
};

/// How the ranks of a job look at their machines: machine_look() in tessera/config/machine_look.h
/// has hwloc, Slurm's tables and files of `tessera bench topology`. What a member throws on one
/// rank is thrown on all.
struct MachineLook {
  /// The name of this rank's host; ranks that say the same share it. Empty: the launcher's name of
  /// it or the system's, and two ranks share a host if the kernel says so.
  std::function<std::string()> host = {};
  /// What the first rank of each host says of its inside, for so many ranks.
  std::function<std::string(int ranks)> inside = {};
  /// What rank 0 says of all machines.
  std::function<std::string()> around = {};
  /// Called on every rank with the same values: hosts, ranks and their slots; what was said of the
  /// inside of each host, and of all. Returns the whole.
  std::function<FoundTopology(FoundTopology hosts, const std::vector<std::string>& insides,
                              const std::string& around)>
      join = {};
};

}  // namespace tessera
