// The families of groups and the meshes of a manager, by name.

#include <algorithm>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/mesh/errors.h"

namespace tessera::detail {

AxisGroupOptions axis_options(const GroupPlan& plan, int view) {
  AxisGroupOptions options;
  for (const auto& family : plan.families()) {
    if (family.view != view) continue;
    auto axes = family.axes;
    std::ranges::sort(axes);
    options.emplace(std::move(axes), family.options);  // the first family of the axes decides
  }
  return options;
}

namespace {

// The same groups: one plan, or the roots of two trees over the same ranks.
bool same_family(const std::string& name, const GroupPlan& known, const GroupPlan& added) {
  if (known.canonical() == added.canonical()) return true;
  const auto root_of = [&](const GroupPlan& plan) {
    const GroupFamily& family = plan.family(name);
    return family.kind != GroupFamily::Kind::orthogonal &&
           plan.group_size(name) == plan.mesh(family).size();
  };
  return root_of(known) && root_of(added) &&
         known.family(name).options == added.family(name).options &&
         known.mesh(known.family(name)).ranks() == added.mesh(added.family(name)).ranks();
}

}  // namespace

void ManagerState::add_families(const GroupPlan& plan) {
  const auto shared = std::make_shared<const GroupPlan>(plan);
  const std::lock_guard lock(mutex_);
  for (const auto& family : plan.families()) {
    if (meshes_.count(family.name))
      throw RepeatedName("a mesh '", family.name,
                         "' exists already; give the group family another name");
    const auto same = std::ranges::find_if(
        families_, [&](const auto& known) { return known.first == family.name; });
    if (same != families_.end() && !same_family(family.name, *same->second, plan))
      throw RepeatedName("a group family '", family.name,
                         "' exists already, from another plan; give the new one another name");
  }
  for (const auto& family : plan.families()) {
    const auto same = std::ranges::find_if(
        families_, [&](const auto& known) { return known.first == family.name; });
    if (same == families_.end()) families_.emplace_back(family.name, shared);
  }
}

std::shared_ptr<const GroupPlan> ManagerState::plan_of(const std::string& family,
                                                       bool or_mesh) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> known;
  for (const auto& [name, plan] : families_) {
    if (name == family) return plan;
    known.push_back(name);
  }
  if (!or_mesh)
    throw UnknownName("there is no group family '", family, "'; create_process_groups() made ",
                      list(known));
  for (const auto& [name, mesh] : meshes_) known.push_back(name);
  throw UnknownName("there is no mesh '", family, "'; create_process_groups() and add_mesh() made ",
                    list(known));
}

Membership ManagerState::membership(const std::string& family) const {
  const auto plan = plan_of(family, false);
  Membership mine;
  mine.family = family;
  mine.ranks = plan->group(family, base_.launch.rank);
  mine.group_rank = plan->group_rank(family, base_.launch.rank);
  mine.options = plan->family(family).options;
  return mine;
}

void ManagerState::add_mesh(const std::string& name, const Mesh& mesh) {
  const std::lock_guard lock(mutex_);
  const bool family =
      std::ranges::any_of(families_, [&](const auto& known) { return known.first == name; });
  const auto [at, added] = meshes_.emplace(name, mesh);
  if (!family && (added || at->second == mesh)) return;
  if (family && added) meshes_.erase(at);
  throw RepeatedName(family ? "a group family '" : "another mesh '", name,
                     "' exists already; give the new mesh another name");
}

std::pair<Mesh, AxisGroupOptions> ManagerState::named_mesh(const std::string& name) const {
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = meshes_.find(name); at != meshes_.end()) return {at->second, {}};
  }
  const auto plan = plan_of(name, true);
  const GroupFamily& family = plan->family(name);
  const Mesh& whole = plan->mesh(family);
  auto axes = family.axes;
  std::ranges::sort(axes);
  auto named = mapped(axes, [&](int axis) { return whole.axes()[axis]; });
  AxisGroupOptions options;
  for (const auto& [of, given] : axis_options(*plan, family.view)) {
    std::vector<int> places;  // of those axes in the smaller mesh
    for (const int axis : of)
      if (const auto at = std::ranges::find(axes, axis); at != axes.end())
        places.push_back(static_cast<int>(at - axes.begin()));
    if (places.size() == of.size()) options.emplace(std::move(places), given);
  }
  return {Mesh(std::move(named), plan->group(name, base_.launch.rank)), std::move(options)};
}

std::vector<std::string> ManagerState::family_names() const {
  const std::lock_guard lock(mutex_);
  return keys_of(families_);
}

}  // namespace tessera::detail
