#pragma once
// Placement: which rank of a mesh sits on which slot of a topology, and what that costs.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// Where the groups of an axis run.
enum class Reach {
  /// Each group on one host.
  inside,
  /// No two members of a group on one host.
  between,
  /// Neither: members share hosts, and groups span hosts.
  both
};
const char* to_string(Reach reach);

/// `host_of[r]` for each rank r that stands in `groups`.
Reach reach_of(const GroupTable& groups, const std::vector<int>& host_of);

/// A group split in two levels: `inside` are its members on one host, `between` the i-th members of
/// every host. all-reduce over a group = reduce-scatter inside, all-reduce between, all-gather
/// inside. The two are orthogonal in the group.
struct HierarchicalGroups {
  RankLists inside, between;
};
/// Throws OrthogonalityError, with the ranks of the host that differs, if a group has unequal
/// numbers of members on its hosts: then no product inside x between exists.
HierarchicalGroups hierarchical_groups(const GroupTable& groups, const std::vector<int>& host_of);

struct MappingOptions {
  /// Distinct placements up to which all are tried. 0: heuristic only.
  long long exact_limit = 50000;
  /// Scales the number of placements that the heuristic tries.
  double effort = 1;
  /// Seed of the local search; the result depends on nothing else that is random.
  std::uint32_t seed = 1;
};

struct RankMapping {
  /// By row-major position of the mesh.
  std::vector<int> slot_of;
  /// Per step.
  double seconds = 0;
  /// Position p on slot p.
  double naive_seconds = 0;
  /// No placement costs less.
  double lower_bound = 0;
  /// All placements were tried (up to devices that are alike).
  bool exact = false;
  /// "naive", "exact", "order model-data ...", "blocks ...", "... + swaps", "given"
  std::string method;
};

/// Position p on slot p.
RankMapping naive_mapping(const CostModel& model);
/// The best that was found; never costs more than the naive one.
RankMapping optimise_mapping(const CostModel& model, const MappingOptions& options = {});
/// The user's own mapping. Throws MappingError with the numbers: too few or too many entries, slots
/// out of range or taken twice.
RankMapping given_mapping(const CostModel& model, std::vector<int> slot_of);

/// The mesh to run when the launcher starts rank r on slot r: the rank at each coordinate is the
/// one that the launcher put on its slot.
Mesh mapped_mesh(const std::vector<Axis>& axes, const RankMapping& placement);

}  // namespace tessera
