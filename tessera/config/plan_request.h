#pragma once
// PlanRequest: what `tessera plan` is asked, from flags or from a file with the same names.
//
//   mesh: data=8,domain=4,model=4      # outermost first; or order + sizes, or tree
//   hosts: 16x8                        # or topology: cluster.yaml
//   groups: [data, domain-model]
//   traffic: {model: "all_reduce:512MB", data: "all_reduce:1GB*2"}

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/format.h"
#include "tessera/mesh/groups/group_config.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/topology.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// Bytes that a group family moves in a step. `family` is an axis, several joined by dashes, a node
/// of the tree or an orthogonal group.
struct FamilyTraffic {
  std::string family;
  Collective collective = Collective::all_reduce;
  double bytes = 0;
  double calls = 1;
};

struct PlanRequest {
  /// 0: follows from the mesh, or from the hosts.
  int world = 0;
  /// Outermost first.
  std::vector<Axis> mesh;
  /// First = adjacent ranks; with `sizes`.
  std::string order;
  std::map<std::string, int> sizes;
  std::optional<ProcessGroupConfig> tree;
  /// Further factorisations of the same ranks.
  std::vector<std::pair<std::string, std::vector<Axis>>> views;
  /// The rank table, row-major over the mesh; empty: 0, 1, 2 ...
  std::vector<int> ranks;
  /// Families to list; empty: all.
  std::vector<std::string> groups;
  /// Families to split into inside x between hosts.
  std::vector<std::string> hierarchical;
  std::optional<Topology> topology;
  std::vector<FamilyTraffic> traffic;
  /// rank -> slot, the user's own.
  std::optional<std::vector<int>> mapping;
  bool optimise = true;
};

/// "data=8,model=4". Throws ConfigFileError, with `what` in front.
std::vector<Axis> parse_axes(const std::string& text, const std::string& what);
/// "model=all_reduce:512MB,data=all_gather:1GB*2" (twice a step).
std::vector<FamilyTraffic> parse_traffic(const std::string& text,
                                         const std::string& what = "traffic");
/// "a,b" -> {"a", "b"}; throws for an empty item.
std::vector<std::string> parse_names(const std::string& text, const std::string& what);

/// "5,0,3,1". Throws ConfigFileError.
std::vector<int> parse_ranks(const std::string& text, const std::string& what);

/// Fields: world, mesh, order, sizes, tree (a path, or the tree itself), views, ranks, groups,
/// hierarchical, hosts, topology (a path, or the topology itself), slurm_topology (a path),
/// traffic, mapping (a path to a rank file, or a list of slots), optimise. Paths are relative to
/// the file's folder.
PlanRequest read_plan_request(const std::string& path);

}  // namespace tessera
