#pragma once
// RankMapping: which rank of a mesh runs on which slot of a topology, and what that costs.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// How the groups of an axis are spread over hosts.
enum class Reach {
  /// Each group on one host.
  inside,
  /// No two members of a group on one host.
  between,
  /// Neither: members share hosts, and groups span hosts.
  both
};
const char* to_string(Reach reach);

/// How `groups` are spread, given the host `host_of[r]` of each rank r in them.
Reach reach_of(const GroupTable& groups, const std::vector<int>& host_of);

/// A group split in two levels: `inside` are its members on one host, `between` the i-th members of
/// every host. An all-reduce over a group is a reduce-scatter inside, an all-reduce between and an
/// all-gather inside. The two are orthogonal in the group.
struct HierarchicalGroups {
  RankLists inside, between;
};
/// Splits the groups in two levels. Throws OrthogonalityError, with the ranks of the host that
/// differs, if a group has unequal numbers of members on its hosts: then no product inside x
/// between exists.
HierarchicalGroups hierarchical_groups(const GroupTable& groups, const std::vector<int>& host_of);

struct MappingOptions {
  /// Largest number of distinct mappings for which all are tried. 0: heuristic only.
  long long exact_limit = 50000;
  /// Scales the number of mappings that the heuristic tries.
  double effort = 1;
  /// Seed of the local search; the result depends on nothing else that is random.
  std::uint32_t seed = 1;
};

struct RankMapping {
  /// Slot of each rank, by row-major position in the mesh.
  std::vector<int> slot_of;
  /// Seconds per step.
  double seconds = 0;
  /// Seconds per step with position p on slot p.
  double naive_seconds = 0;
  /// No mapping costs less than this.
  double lower_bound = 0;
  /// All mappings were tried (up to devices that are alike).
  bool exact = false;
  /// How it was found: "naive", "exact", "order model-data ...", "blocks ...", "... + swaps",
  /// "given".
  std::string method;
};

/// The mapping with position p on slot p.
RankMapping naive_mapping(const CostModel& model);
/// The best mapping that was found; it never costs more than the naive one.
RankMapping optimise_mapping(const CostModel& model, const MappingOptions& options = {});
/// A mapping of the user's own. Throws MappingError with the numbers: too few or too many entries,
/// slots out of range or taken twice.
RankMapping given_mapping(const CostModel& model, std::vector<int> slot_of);

/// The mesh to use when the launcher starts rank r on slot r: the rank at each coordinate is the
/// one that the launcher put on its slot.
Mesh mapped_mesh(const std::vector<Axis>& axes, const RankMapping& placement);

}  // namespace tessera
