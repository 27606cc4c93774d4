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

#include "tessera/config/errors.h"
#include "tessera/mesh/groups/group_config.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/topology.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// Bytes that a group family moves per step. `family` is an axis, several joined by dashes, a node
/// of the tree or an orthogonal group.
struct FamilyTraffic {
  std::string family;
  Collective collective = Collective::all_reduce;
  double bytes = 0;
  double calls = 1;
};

struct PlanRequest {
  /// Number of ranks; 0: follows from the mesh, or from the hosts.
  int world = 0;
  /// Axes of the mesh, outermost first.
  std::vector<Axis> mesh;
  /// Names of axes, those with adjacent ranks first; used with `sizes`.
  std::string order;
  std::map<std::string, int> sizes;
  std::optional<ProcessGroupConfig> tree;
  /// Further factorisations of the same ranks.
  std::vector<std::pair<std::string, std::vector<Axis>>> views;
  /// The rank table, row-major over the mesh; empty: 0, 1, 2 ...
  std::vector<int> ranks;
  /// Families to list; empty: all.
  std::vector<std::string> groups;
  /// Families to split into groups inside hosts and groups between hosts.
  std::vector<std::string> hierarchical;
  std::optional<Topology> topology;
  std::vector<FamilyTraffic> traffic;
  /// The user's own mapping: slot of each rank.
  std::optional<std::vector<int>> mapping;
  bool optimise = true;
};

/// Reads axes: "data=8,model=4". Throws ConfigFileError that begins with `what`.
std::vector<Axis> parse_axes(const std::string& text, const std::string& what);
/// Reads traffic: "model=all_reduce:512MB,data=all_gather:1GB*2" (`*2`: two calls per step).
std::vector<FamilyTraffic> parse_traffic(const std::string& text,
                                         const std::string& what = "traffic");
/// Sets the traffic: a text as above, or a file of write_traffic(), by its ending, in `folder`; the
/// file's mesh is the request's unless that has one.
void set_traffic(PlanRequest& request, const std::string& text, const std::string& what,
                 const std::string& folder = "");
/// Reads names: "a,b" -> {"a", "b"}. Throws ConfigFileError for an empty item.
std::vector<std::string> parse_names(const std::string& text, const std::string& what);

/// Reads ranks: "5,0,3,1". Throws ConfigFileError.
std::vector<int> parse_ranks(const std::string& text, const std::string& what);

/// Reads a request from a file with these fields: world, mesh, order, sizes, tree (a path, or the
/// tree itself), views, ranks, groups, hierarchical, hosts, topology (a path, or the topology
/// itself), slurm_topology (a path), traffic, mapping (a path to a rank file, or a list of slots),
/// optimise. Paths are relative to the file's folder. Throws ConfigFileError.
PlanRequest read_plan_request(const std::string& path);

}  // namespace tessera
