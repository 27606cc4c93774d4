#pragma once
// What a step of a program moves along the axes of its mesh, taken from traces of its ranks, for
// the mapping of the ranks to machines:
//
//   CommTraceScope trace(manager);
//   train_one_step();
//   const MeshTraffic moved = mean_traffic(*trace, mesh).moved;
//   const MappingGain gain =
//       mapping_gain(mesh.mesh(), find_topology(manager, machine_look()), moved.traffic);
//   if (manager.rank() == 0) std::cout << gain.to_string();
//   write_traffic(moved, "traffic.yaml");  // for `tessera run --map` and `tessera plan --traffic`

#include <vector>

#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/mesh/mapping/mesh_traffic.h"

namespace tessera {

struct MeanTraffic {
  /// Calls of one family of groups and collective whose bytes have the same power of two are one
  /// entry, of their mean.
  MeshTraffic moved;
  /// Calls of this rank that no entry stands for: of groups that are none of the mesh's, and what
  /// the cost model does not know (gather, scatter, barrier).
  std::vector<CommSummary> left_out;
};

/// The calls that the ranks of the mesh have made in `steps` steps each, by the axes over whose
/// groups they went, without those of one rank. The mean over all ranks, so that uneven shards
/// count with their sum. Messages, and exchanges with neighbours, are `send`: each counts once, for
/// the pair of neighbours that it passes, of which a group of p ranks has p-1. A trace does not
/// name the peer: the message of a ring from the last rank to the first counts as if it passed such
/// a pair, so that a ring has p/(p-1) of a chain's bytes. Collective over the mesh; every rank gets
/// the same. Throws InvalidArgument on every rank if one has a number of steps that is not finite
/// and above 0, and on a rank outside the mesh.
MeanTraffic mean_traffic(const CommTrace& trace, const DeviceMesh& mesh, double steps = 1);

}  // namespace tessera
