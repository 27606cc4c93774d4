#pragma once
// The machines of a running job, as its ranks find them:
//
//   const FoundTopology found = find_topology(manager, machine_look());  // tessera/config
//   for (const std::string& what : found.unknown) std::cerr << what << '\n';
//   create_process_groups(manager, tree, found, traffic);

#include <vector>

#include "tessera/comm/job/manager.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// Asks every rank for its host, and, with machine_look(), what it sees of its inside and around
/// it. The devices of a host are numbered by its ranks' local ranks. Collective over the world,
/// with the same members of `look` on all ranks; every rank gets the same. Without a look the
/// inside of hosts and what connects them is unknown. Throws on every rank what a look throws on
/// one; MappingError for names of hosts that Topology::check() refuses.
FoundTopology find_topology(const DistributedManager& manager, const MachineLook& look = {});

/// As DistributedManager::create_process_groups() with a topology, where rank r need not run on
/// slot r. The mapping has the slot of each position; found.ranks(mapping) the ranks. Throws
/// MappingError if the machines were found for another number of ranks.
RankMapping create_process_groups(const DistributedManager& manager,
                                  const ProcessGroupConfig& config, const FoundTopology& found,
                                  const std::vector<Traffic>& traffic = {}, bool eager = false);

}  // namespace tessera
