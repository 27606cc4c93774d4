#include "tessera/mesh/groups/group_plan.h"

#include <algorithm>

#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/order.h"

namespace tessera {
namespace {

const char* kind_name(GroupFamily::Kind kind) {
  static constexpr const char* kNames[] = {"axes", "node", "leaf", "orthogonal"};
  return kNames[static_cast<std::size_t>(kind)];
}

/// The ranks that two groups of rank `first` have in common.
std::vector<int> common(const std::vector<int>& a, const std::vector<int>& b) {
  return filtered(a, [&](int rank) { return std::ranges::find(b, rank) != b.end(); });
}

std::vector<int> axes_of_node(const ProcessGroupConfig& config, const Mesh& mesh,
                              const std::string& node) {
  return mesh.indices(config.leaf_groups(node));
}

GroupFamily orthogonal_family(const ProcessGroupConfig& config, const Mesh& mesh,
                              const OrthogonalGroup& group) {
  const int first = mesh.ranks().front();
  GroupFamily family{group.name, GroupFamily::Kind::orthogonal, 0, {}, group.options, group.of};
  std::vector<int> inside;
  for (std::size_t i = 0; i < group.of.size(); ++i) {
    const auto axes = axes_of_node(config, mesh, group.of[i]);
    if (config.parent(group.of[i]).empty()) {
      const auto all = mesh.group(axes, first);
      throw OrthogonalityError(
          concat("'", group.name, "' is to be orthogonal to the root '", group.of[i],
                 "', whose one group holds all ranks ", list(all),
                 ": no rank is outside it, so the root has no orthogonal groups"),
          all);
    }
    for (std::size_t j = 0; j < i; ++j) {
      const auto other = axes_of_node(config, mesh, group.of[j]);
      if (common(axes, other).empty()) continue;
      const auto ranks = common(mesh.group(axes, first), mesh.group(other, first));
      throw OrthogonalityError(
          concat("'", group.name, "' is to be orthogonal to '", group.of[j], "' and '", group.of[i],
                 "', but one is inside the other: both groups of rank ", first, " hold ",
                 list(ranks), "; name only the outer one"),
          ranks);
    }
    inside.insert(inside.end(), axes.begin(), axes.end());
  }
  family.scope = config.scope_of(group);
  const auto scope = axes_of_node(config, mesh, family.scope);
  const auto mine = mesh.group(inside, first), around = mesh.group(scope, first);
  for (int axis : inside) {
    if (std::ranges::find(scope, axis) != scope.end()) continue;
    auto outside =
        filtered(mine, [&](int rank) { return std::ranges::find(around, rank) == around.end(); });
    // axes of size 1: no rank is outside, but the scope is still no ancestor
    if (outside.empty()) outside = mine;
    throw OrthogonalityError(
        concat("'", group.name, "' is to be orthogonal to ", list(group.of), " in the scope '",
               family.scope, "', which does not hold it: the group ", list(mine), " of rank ",
               first, " is not within the scope's ", list(around), ": it has ranks ", list(outside),
               "; choose an ancestor of ", list(group.of), " or 'world'"),
        outside);
  }
  family.axes = mesh.complement(inside, scope);
  if (family.axes.empty())
    throw OrthogonalityError(
        concat("'", group.name, "' is to be orthogonal to ", list(group.of), " in the scope '",
               family.scope, "', but fills it: both groups of rank ", first, " are ", list(mine),
               ", so each orthogonal group would be one rank alone; choose a wider scope"),
        mine);
  return family;
}

GroupPlan plan_of(const ProcessGroupConfig& config, Mesh mesh) {
  GroupPlan plan(std::move(mesh), config.root().name);
  for (const auto& name : config.node_names()) {
    const auto kind = config.is_leaf(name) ? GroupFamily::Kind::leaf : GroupFamily::Kind::node;
    plan.add({name, kind, 0, axes_of_node(config, plan.mesh(), name), config.node(name).options});
  }
  for (const auto& group : config.orthogonal_groups())
    plan.add(orthogonal_family(config, plan.mesh(), group));
  return plan;
}

}  // namespace

GroupPlan::GroupPlan(Mesh mesh, std::string view) {
  views_.emplace_back(std::move(view), std::move(mesh));
}

GroupPlan::GroupPlan(const MeshViews& views) : views_(views.all()) {
  for (int v = 0; v < static_cast<int>(views_.size()); ++v) {
    const Mesh& mesh = views_[v].second;
    for (int i = 0; i < mesh.dims(); ++i) {
      const auto& name = mesh.axes()[i].name;
      const bool known =
          std::ranges::any_of(families_, [&](const GroupFamily& f) { return f.name == name; });
      if (!known) add({name, GroupFamily::Kind::axes, v, {i}});
    }
  }
}

GroupPlan GroupPlan::of_mesh(Mesh mesh) { return GroupPlan(MeshViews("mesh", std::move(mesh))); }

GroupPlan GroupPlan::of_config(const ProcessGroupConfig& config, int world_size) {
  const auto resolved = config.resolve(world_size);
  return plan_of(resolved, resolved.mesh(world_size));
}

GroupPlan GroupPlan::of_config(const ProcessGroupConfig& config, std::vector<int> ranks) {
  const auto resolved = config.resolve(static_cast<int>(ranks.size()));
  return plan_of(resolved, resolved.mesh(std::move(ranks)));
}

void GroupPlan::add(GroupFamily family) {
  if (family.name.empty()) throw GroupConfigError("a group family has an empty name; give it one");
  for (const auto& known : families_)
    if (known.name == family.name)
      throw RepeatedName("there are two group families named '", family.name, "' (",
                         kind_name(known.kind), " and ", kind_name(family.kind),
                         "); give each its own name");
  if (family.view < 0 || family.view >= static_cast<int>(views_.size()))
    throw InvalidArgument("group family '", family.name, "' is of view ", family.view,
                          ", but the plan has ", views_.size(), " views");
  mesh(family).group_size(family.axes);
  std::ranges::sort(family.axes);
  families_.push_back(std::move(family));
}

void GroupPlan::add_axes(const std::string& names) {
  const auto axes = split_order(names);
  for (const auto& axis : axes)
    if (!mesh().has_axis(axis))
      throw UnknownName("group '", names, "' names the axis '", axis, "'; the axes are ",
                        list(mesh().names()));
  const auto indices = mesh().indices(axes);
  for (const auto& known : families_)
    if (known.name == names && known.view == 0 && known.axes == indices) return;
  add({names, GroupFamily::Kind::axes, 0, indices});
}

const GroupFamily& GroupPlan::family(const std::string& name) const {
  for (const auto& family : families_)
    if (family.name == name) return family;
  throw UnknownName("the plan has no groups '", name, "'; it has ",
                    list(mapped(families_, &GroupFamily::name)));
}

int GroupPlan::group_size(const std::string& name) const {
  const auto& f = family(name);
  return mesh(f).group_size(f.axes);
}

std::vector<int> GroupPlan::group(const std::string& name, int rank) const {
  const auto& f = family(name);
  return mesh(f).group(f.axes, rank);
}

int GroupPlan::group_rank(const std::string& name, int rank) const {
  const auto& f = family(name);
  return mesh(f).group_rank(f.axes, rank);
}

GroupTable GroupPlan::groups(const std::string& name) const {
  const auto& f = family(name);
  return mesh(f).groups(f.axes);
}

std::vector<Membership> GroupPlan::memberships(int rank) const {
  std::vector<Membership> mine;
  mine.reserve(families_.size());
  for (const auto& f : families_)
    mine.push_back(
        {f.name, mesh(f).group(f.axes, rank), mesh(f).group_rank(f.axes, rank), f.options});
  return mine;
}

std::string GroupPlan::canonical() const {
  TextStream out;
  for (const auto& [name, mesh] : views_) {
    out << "view " << name << ": " << mesh.size() << " ranks, axes";
    for (const Axis& axis : mesh.axes()) out << ' ' << axis.name << '=' << axis.size;
    if (mesh.row_major()) {
      out << ", row-major\n";
    } else {
      Hash hash;
      for (int rank : mesh.ranks()) hash.number(static_cast<std::uint64_t>(rank));
      out << ", ranks " << list(mesh.ranks(), 16) << " #" << std::hex << hash.value() << std::dec
          << '\n';
    }
  }
  for (const auto& f : families_) {
    const Mesh& mesh = this->mesh(f);
    out << "groups " << f.name << " (" << kind_name(f.kind);
    if (f.kind == GroupFamily::Kind::orthogonal) out << " to " << list(f.of) << " in " << f.scope;
    out << "): " << mesh.group_size(f.axes) << " ranks, view " << views_[f.view].first << ", axes";
    for (int axis : f.axes)
      out << ' ' << mesh.axes()[axis].name << '=' << mesh.size(axis) << ":" << mesh.stride(axis);
    out << ", backend " << (f.options.backend.empty() ? "default" : f.options.backend);
    out << ", timeout "
        << (f.options.timeout ? concat(f.options.timeout->count(), "ms") : "default") << '\n';
  }
  return std::move(out).str();
}

std::uint64_t GroupPlan::hash() const { return Hash().text(canonical()).value(); }

std::optional<PlanDifference> first_difference(const std::string& mine, const std::string& theirs) {
  if (mine == theirs) return std::nullopt;
  TextReader a(mine), b(theirs);
  for (int line = 1;; ++line) {
    PlanDifference d{line, "", ""};
    const bool more_a = static_cast<bool>(std::getline(a, d.mine)),
               more_b = static_cast<bool>(std::getline(b, d.theirs));
    if (d.mine != d.theirs || more_a != more_b || !more_a) return d;
  }
}

}  // namespace tessera
