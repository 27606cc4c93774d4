#include "plan.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/order.h"

namespace tessera::app {
namespace {

/// The one way in which the request says the mesh.
GroupPlan groups_of(const PlanRequest& request, Plan& plan) {
  const bool named = !request.order.empty();
  const int ways = !request.mesh.empty() + named + request.tree.has_value();
  if (ways != 1)
    throw GroupConfigError("say the mesh in one way, but ", ways,
                           " were given: --mesh data=8,model=4, or --order tp-dp with "
                           "--sizes tp=2,dp=4, or --tree FILE");
  if (!request.sizes.empty() && !named)
    throw GroupConfigError("sizes need an order (--order tp-cp-dp, first = adjacent ranks)");
  int world = request.world;
  if (world == 0 && !request.ranks.empty()) world = static_cast<int>(request.ranks.size());
  if (request.tree) {
    if (!request.views.empty())
      throw GroupConfigError("views go with --mesh or --order, not with a tree");
    if (world == 0 && request.topology) world = request.topology->slots();
    if (world == 0)
      throw GroupConfigError("a tree needs the number of ranks: give --world or --hosts");
    const auto resolved = request.tree->resolve(world);
    plan.tree = resolved.to_string();
    return request.ranks.empty() ? GroupPlan::of_config(resolved, world)
                                 : GroupPlan::of_config(resolved, request.ranks);
  }
  const auto axes = named ? axes_from_order(request.order, request.sizes) : request.mesh;
  const Mesh shape(axes);
  if (world != 0 && shape.size() != world)
    throw WorldSizeMismatch(
        concat("the mesh ", shape, " has ", shape.size(), " ranks, but the world has ", world),
        world, shape.size());
  MeshViews views("mesh", request.ranks.empty() ? shape : Mesh(axes, request.ranks));
  for (const auto& [name, view] : request.views) views.add(name, view);
  return GroupPlan(views);
}

/// Traffic of families in terms of the first view's axes.
std::vector<Traffic> traffic_of(const PlanRequest& request, GroupPlan& groups) {
  std::vector<Traffic> traffic;
  for (const FamilyTraffic& t : request.traffic) {
    const bool known = std::ranges::any_of(
        groups.families(), [&](const GroupFamily& f) { return f.name == t.family; });
    if (!known) groups.add_axes(t.family);
    const GroupFamily& family = groups.family(t.family);
    if (family.view != 0)
      throw GroupConfigError("traffic of '", t.family,
                             "', which is an axis of another view: the cost model places "
                             "the first view's axes; make the finest view the first");
    Traffic one{{}, t.collective, t.bytes, t.calls};
    for (int axis : family.axes) one.axes.push_back(groups.mesh().axes()[axis].name);
    if (one.axes.empty())
      throw GroupConfigError("traffic of '", t.family, "', whose groups are single ranks");
    traffic.push_back(std::move(one));
  }
  return traffic;
}

PlannedPlacement place(const PlanRequest& request, const GroupPlan& groups,
                       std::vector<Traffic> traffic) {
  const Mesh& mesh = groups.mesh();
  const int n = mesh.size();
  for (int rank : mesh.ranks())
    if (rank >= n)
      throw MappingError("hosts are given, so the ranks must be 0 to ", n - 1,
                         " in any order, but the table holds rank ", rank);
  PlannedPlacement placed;
  placed.topology = *request.topology;
  const CostModel model(placed.topology, mesh.axes(), std::move(traffic));
  const auto by_position = [&](const std::vector<int>& slot_of_rank) {
    std::vector<int> slots(n);
    for (int p = 0; p < n; ++p) slots[p] = slot_of_rank[mesh.ranks()[p]];
    return slots;
  };
  // Naive: the launcher's way, rank r on slot r.
  std::vector<int> naive(n);
  std::iota(naive.begin(), naive.end(), 0);
  naive = by_position(naive);
  RankMapping found;
  if (request.mapping) {
    given_mapping(model, *request.mapping);  // refuses what is no mapping
    found = given_mapping(model, by_position(*request.mapping));
  } else if (request.optimise && !model.traffic().empty()) {
    found = optimise_mapping(model);
    if (model.seconds(naive) <= found.seconds) {
      found.slot_of = naive;
      found.seconds = model.seconds(naive);
      found.method = "naive";
    }
  } else {
    found = given_mapping(model, naive);
    found.method = "naive";
  }
  placed.seconds = found.seconds;
  placed.naive_seconds = model.seconds(naive);
  placed.lower_bound = found.lower_bound;
  placed.exact = found.exact;
  placed.method = found.method;
  placed.cost = model.cost(found.slot_of).axes;
  placed.naive_cost = model.cost(naive).axes;
  placed.launcher_table = found.slot_of;
  const auto host_of_slot = placed.topology.hosts_of_slots();
  placed.slot_of.resize(n);
  placed.host_of.resize(n);
  for (int p = 0; p < n; ++p) {
    placed.slot_of[mesh.ranks()[p]] = found.slot_of[p];
    placed.host_of[mesh.ranks()[p]] = host_of_slot[found.slot_of[p]];
  }
  for (std::size_t t = 0; t < placed.cost.size(); ++t)
    placed.cost[t].axes = placed.naive_cost[t].axes = request.traffic[t].family;
  return placed;
}

void warn(const PlanRequest& request, const GroupPlan& groups, Plan& plan) {
  const auto& placed = *plan.placement;
  int most = 0;
  for (const Host& host : placed.topology.hosts) most = std::max(most, host.devices);
  for (std::size_t t = 0; t < request.traffic.size(); ++t) {
    const auto& family = request.traffic[t].family;
    const int size = groups.group_size(family);
    const double seconds = placed.cost[t].seconds;
    // What is worth a warning: it takes a good part of the time, and it leaves its host.
    if (seconds < 0.25 * placed.seconds ||
        reach_of(groups.groups(family), placed.host_of) == Reach::inside)
      continue;
    plan.warnings.push_back(concat(family, " crosses hosts and takes ", duration_text(seconds),
                                   " of ", duration_text(placed.seconds),
                                   " per step: its groups of ", size,
                                   size <= most ? " would fit on hosts with up to "
                                                : " are larger than any host, which has up to ",
                                   most, " devices"));
  }
  const int spare = placed.topology.slots() - plan.mesh.size();
  if (spare > 0)
    plan.warnings.push_back(
        concat(spare, " of ", placed.topology.slots(), " devices stay without a rank"));
}

}  // namespace

Plan make_plan(const PlanRequest& request) {
  Plan plan;
  GroupPlan groups = groups_of(request, plan);
  plan.mesh = groups.mesh();
  const bool can_be_named = std::ranges::none_of(plan.mesh.axes(), [](const Axis& axis) {
    return axis.name.empty() || axis.name.find('-') != std::string::npos;
  });
  if (can_be_named) plan.order = order_of(plan.mesh);
  if (!request.traffic.empty() && !request.topology)
    throw GroupConfigError(
        "traffic is given, but no machines to place it on; add --hosts or --topology");
  if (request.mapping && !request.topology)
    throw GroupConfigError("a mapping is given, but no machines; add --hosts or --topology");
  if (!request.hierarchical.empty() && !request.topology)
    throw GroupConfigError(
        "groups inside and between hosts need the machines; add --hosts or --topology");
  const auto exists = [&](const std::string& name) {
    return std::ranges::any_of(groups.families(),
                               [&](const GroupFamily& f) { return f.name == name; });
  };
  const auto listed = [&] {
    std::vector<std::string> names = request.groups;
    if (names.empty())
      for (const auto& f : groups.families()) names.push_back(f.name);
    return names;
  }();
  for (const auto& name : listed)
    if (!exists(name)) groups.add_axes(name);
  auto traffic = traffic_of(request, groups);
  if (request.topology) plan.placement = place(request, groups, std::move(traffic));
  for (const auto& name : listed) {
    const auto& family = groups.family(name);
    PlannedFamily planned{name, groups.groups(name), {}, "", family.options};
    if (plan.placement) planned.reach = reach_of(planned.groups, plan.placement->host_of);
    if (family.kind == GroupFamily::Kind::orthogonal)
      planned.note = concat("orthogonal to ", list(family.of), " in ", family.scope);
    plan.families.push_back(std::move(planned));
  }
  for (const auto& name : request.hierarchical) {
    if (!exists(name)) groups.add_axes(name);
    const auto levels = hierarchical_groups(groups.groups(name), plan.placement->host_of);
    for (const auto& [suffix, lists] :
         {std::pair<const char*, const RankLists&>(".inside", levels.inside),
          {".between", levels.between}}) {
      PlannedFamily planned{
          name + suffix, {}, {}, concat("of ", name), groups.family(name).options};
      planned.groups.group_size = static_cast<int>(lists.front().size());
      for (const auto& ranks : lists) {
        if (ranks.size() != lists.front().size())
          throw OrthogonalityError(concat("the groups of '", name,
                                          "' lie differently on the hosts: ", list(lists.front()),
                                          " and ", list(ranks), " are both on one host"),
                                   ranks);
        planned.groups.members.insert(planned.groups.members.end(), ranks.begin(), ranks.end());
      }
      planned.reach = reach_of(planned.groups, plan.placement->host_of);
      plan.families.push_back(std::move(planned));
    }
  }
  if (plan.placement) warn(request, groups, plan);
  plan.canonical = groups.canonical();
  TextStream hex;
  hex << std::hex << groups.hash();
  plan.hash = std::move(hex).str();
  return plan;
}

}  // namespace tessera::app
