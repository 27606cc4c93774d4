#pragma once
// What a step of a program moves along the axes of its mesh, taken from a trace, for the mapping of
// its ranks to machines:
//
//   CommTraceScope trace(manager);
//   train_one_step();
//   const MeshTraffic moved = traffic_of(*trace, mesh);
//   const CostModel model(find_topology(), mesh.mesh().axes(), moved.traffic);
//   const RankMapping best = optimise_mapping(model);   // best.seconds beside best.naive_seconds
//   // format_traffic(moved.traffic) is what `tessera plan --traffic` reads

#include <vector>

#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/mesh/mapping/cost.h"

namespace tessera {

struct MeshTraffic {
  /// One entry for each family of groups, collective and size of its calls.
  std::vector<Traffic> traffic;
  /// Calls that no entry stands for: of groups that are none of the mesh's, and what the cost model
  /// does not know (gather, scatter, barrier). Receives are counted where they are sent.
  std::vector<CommSummary> left_out;
};

/// The calls that this rank has made in `steps` steps, by the axes of the mesh over whose groups
/// they went; the fewest axes where several name the same ranks. Messages and exchanges with
/// neighbours count as `send`. Bytes are those that this rank gave: ranks with uneven shards count
/// other ones. Not collective. Throws InvalidArgument if `steps` is not above 0, or this rank is
/// not in the mesh.
MeshTraffic traffic_of(const CommTrace& trace, const DeviceMesh& mesh, double steps = 1);

}  // namespace tessera
