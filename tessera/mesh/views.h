#pragma once
// MeshViews: several factorisations of the same ranks, where an axis that two of them name is
// proven to be the same axis.
//
//   MeshViews views("dense", Mesh({{"data", 4}, {"tensor", 2}}));
//   // error: `data` has size 4 in one view and 2 in the other
//   views.add("expert", {{"data", 2}, {"expert", 2}, {"tensor", 2}});
//   // `tensor` is shared and proven equal
//   views.add("expert", {{"expert_data", 2}, {"expert", 2}, {"tensor", 2}});
//   views.group("expert", 5), views.group("tensor", 5)

#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

class MeshViews {
 public:
  MeshViews(std::string name, Mesh mesh);
  /// Adds the same ranks under other axes, row-major over the first view's table.
  void add(const std::string& name, std::vector<Axis> axes);
  /// Adds any mesh of the same ranks. Throws ViewMismatch, with ranks, if it holds other ranks, or
  /// if an axis that another view names has other groups here (members or their order);
  /// RepeatedName if the view's name is taken. A view that was refused is not added.
  void add(const std::string& name, Mesh mesh);

  const std::vector<std::pair<std::string, Mesh>>& all() const { return views_; }
  /// The view of this name. Throws UnknownName.
  const Mesh& view(const std::string& name) const;
  /// The first view that has this axis. Throws UnknownName.
  const Mesh& view_of_axis(const std::string& axis) const;
  std::vector<int> group(const std::string& axis, int rank) const;
  /// Axes that more than one view names.
  std::vector<std::string> shared_axes() const;

 private:
  std::vector<std::pair<std::string, Mesh>> views_;
};

}  // namespace tessera
