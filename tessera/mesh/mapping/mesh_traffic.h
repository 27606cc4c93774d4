#pragma once
// MeshTraffic: what a step moves along the axes of a mesh, and what another mapping of the ranks
// would gain. Traced by mean_traffic() (tessera/comm/job/mesh_traffic.h), kept in a file by
// tessera/config/traffic_file.h.

#include <string>
#include <vector>

#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

struct MeshTraffic {
  /// The mesh, outermost axis first.
  std::vector<Axis> axes;
  /// What each family of its groups moves per step.
  std::vector<Traffic> traffic;
  bool operator==(const MeshTraffic&) const = default;
};

/// Throws GroupConfigError for bytes, calls or a product of the two that are negative or not
/// finite, and for an entry without axes; UnknownName for an axis that the mesh does not have,
/// RepeatedName for one that an entry names twice.
void check_traffic(const Mesh& mesh, const std::vector<Traffic>& traffic);

/// Bytes per step that leave a host with this mapping. Rings and trees run in order of slots, as
/// for the cost, so a group on h > 1 hosts sends 2h(p-1)/p buffers of an all-reduce between them,
/// h(p-1)/p of an all-gather or a reduce-scatter, h-1 of a broadcast or a reduce; of the other two,
/// what goes between pairs on different hosts. Throws MappingError as given_mapping().
double bytes_between_hosts(const CostModel& model, const std::vector<int>& slot_of);

/// What another mapping of a running job would gain, per step.
struct MappingGain {
  /// The best mapping that was found; where none beats what is there, what is there, and its method
  /// is "as it is".
  RankMapping mapping;
  /// The rank to put at each position of the mesh: Mesh(axes, ranks).
  std::vector<int> ranks;
  double seconds = 0, mapped_seconds = 0;
  /// Bytes between hosts.
  double bytes = 0, mapped_bytes = 0;

  /// Three lines: now, mapped, the ranks.
  std::string to_string() const;
};

/// Compares where the ranks of `mesh` are on the machines with the best mapping for `traffic`.
/// Arithmetic alone: from the same values every rank gets the same. Throws MappingError unless the
/// mesh has all ranks of the job, and what CostModel throws.
MappingGain mapping_gain(const Mesh& mesh, const FoundTopology& machines,
                         const std::vector<Traffic>& traffic, const MappingOptions& options = {});

}  // namespace tessera
