#include "tessera/mesh/views.h"

#include <algorithm>
#include <set>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

// Throws unless every rank has the same group, in the same order, along `axis` of both meshes.
void require_same_axis(const Mesh& a, const std::string& a_name, const Mesh& b,
                       const std::string& b_name, const std::string& axis) {
  const auto groups = a.groups(axis);
  const int other[] = {b.index(axis)};
  for (int i = 0; i < groups.count(); ++i) {
    const auto mine = groups[i];
    const auto theirs = b.group(other, mine.front());
    if (std::ranges::equal(mine, theirs)) continue;
    std::vector<int> ranks;
    for (int rank : mine)
      if (std::ranges::find(theirs, rank) == theirs.end()) ranks.push_back(rank);
    for (int rank : theirs)
      if (std::ranges::find(mine, rank) == mine.end()) ranks.push_back(rank);
    if (ranks.empty()) ranks.assign(mine.begin(), mine.end());  // the same ranks in another order
    throw ViewMismatch(concat("axis '", axis, "' differs between two views: rank ", mine.front(),
                              " has the group ", list(mine), " in '", a_name, "' and ",
                              list(theirs), " in '", b_name, "'; offending ranks ", list(ranks),
                              "; give the axis another name or give both views the same groups"),
                       ranks);
  }
}

}  // namespace

MeshViews::MeshViews(std::string name, Mesh mesh) {
  views_.emplace_back(std::move(name), std::move(mesh));
}

void MeshViews::add(const std::string& name, std::vector<Axis> axes) {
  const Mesh& first = views_.front().second;
  axes = closed_axes(std::move(axes), first.size());
  long long product = 1;
  for (const Axis& axis : axes) product *= std::max(axis.size, 1);
  if (product != first.size())
    throw WorldSizeMismatch(concat("view '", name, "' has ", product, " coordinates, but view '",
                                   views_.front().first, "' has ", first.size(), " ranks"),
                            first.size(), product);
  add(name, first.view(std::move(axes)));
}

void MeshViews::add(const std::string& name, Mesh mesh) {
  const Mesh& first = views_.front().second;
  for (const auto& [taken, view] : views_)
    if (taken == name) throw RepeatedName("there is a view '", name, "' already");
  const auto foreign = filtered(mesh.ranks(), [&](int rank) { return !first.contains(rank); });
  auto missing = filtered(first.ranks(), [&](int rank) { return !mesh.contains(rank); });
  if (!foreign.empty() || !missing.empty()) {
    const std::string text =
        concat("view '", name, "' must hold the ranks of view '", views_.front().first,
               "': it lacks ", list(missing), " and has ", list(foreign), " besides");
    missing.insert(missing.end(), foreign.begin(), foreign.end());
    throw ViewMismatch(text, missing);
  }
  for (const auto& [other_name, other] : views_)
    for (const Axis& axis : mesh.axes())
      if (other.has_axis(axis.name)) require_same_axis(other, other_name, mesh, name, axis.name);
  views_.emplace_back(name, std::move(mesh));
}

const Mesh& MeshViews::view(const std::string& name) const {
  for (const auto& [known, mesh] : views_)
    if (known == name) return mesh;
  throw UnknownName("there is no view '", name, "'; the views are ", list(keys_of(views_)));
}

const Mesh& MeshViews::view_of_axis(const std::string& axis) const {
  std::vector<std::string> names;
  for (const auto& [name, mesh] : views_) {
    if (mesh.has_axis(axis)) return mesh;
    for (const auto& known : mesh.names()) names.push_back(concat(name, ".", known));
  }
  throw UnknownName("no view has an axis '", axis, "'; there are ", list(names));
}

std::vector<int> MeshViews::group(const std::string& axis, int rank) const {
  return view_of_axis(axis).group(axis, rank);
}

std::vector<std::string> MeshViews::shared_axes() const {
  std::vector<std::string> shared;
  std::set<std::string> once, twice;
  for (const auto& [name, mesh] : views_)
    for (const auto& axis : mesh.names())
      if (!once.insert(axis).second && twice.insert(axis).second) shared.push_back(axis);
  return shared;
}

}  // namespace tessera
