#pragma once
// What `tessera plan` does, apart from its flags: a request becomes groups, a placement and
// warnings; these become text, JSON or a picture.

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/internal/plan_request.h"
#include "tessera/mesh/groups/group_plan.h"
#include "tessera/mesh/mapping/rank_mapping.h"

namespace tessera::app {

/// One family of groups and, with hosts, where it runs.
struct PlannedFamily {
  std::string name;
  GroupTable groups;
  /// Of the placement.
  std::optional<Reach> reach;
  /// "orthogonal to [shard] in dp"
  std::string note;
  GroupOptions options;
};

/// Machines, the placement on them, and what the traffic costs there.
struct PlannedPlacement {
  Topology topology;
  /// By rank.
  std::vector<int> slot_of;
  /// By rank.
  std::vector<int> host_of;
  /// Row-major over the mesh: the ranks to give the mesh if the launcher starts rank r on slot r.
  std::vector<int> launcher_table;
  double seconds = 0, naive_seconds = 0, lower_bound = 0;
  bool exact = false;
  std::string method;
  std::vector<AxisCost> cost, naive_cost;
};

struct Plan {
  Mesh mesh;
  /// Innermost first; empty if a name cannot stand in an order.
  std::string order;
  /// Printed; empty without one.
  std::string tree;
  std::vector<PlannedFamily> families;
  std::optional<PlannedPlacement> placement;
  std::vector<std::string> warnings;
  std::string canonical;
  std::string hash;
};

/// Throws the typed errors of layout and config.
Plan make_plan(const PlanRequest& request);

std::string plan_text(const Plan& plan, std::optional<int> rank, int most_groups);
std::string plan_json(const Plan& plan, std::optional<int> rank);
/// One self-contained SVG: hosts and devices once for each family, coloured by group. `rank`: whose
/// groups stand out.
std::string plan_svg(const Plan& plan, int rank);
/// The same in a page where pointing at a device shows its groups everywhere.
std::string plan_html(const Plan& plan, int rank);

/// "1.25 ms", "40 us", "3.1 s"
std::string duration_text(double seconds);

}  // namespace tessera::app
