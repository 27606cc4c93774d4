#pragma once
// DeviceMesh: a mesh and its groups, as seen from one rank.
//
//   auto mesh = manager.mesh({{"data", 2}, {"domain", 3}});   // ranks 0..5
//   mesh.coordinate()                     // rank 4: {1, 1}
//   mesh.group("domain")                  // rank 4: ranks 3, 4, 5; its rank there is 1
//   mesh.group(std::vector<int>{0, 1})    // all six
//
// The groups are the manager's: two meshes that have a group with the same ranks and options share
// it, and it is made once.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/comm/job/manager.h"
#include "tessera/mesh/groups/group_config.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// Backend and time limit of the group over some axes of a mesh, keyed by the indices of these axes
/// in ascending order. Groups over other axes have the manager's.
using AxisGroupOptions = std::map<std::vector<int>, GroupOptions>;

class DeviceMesh {
 public:
  /// Throws InvalidArgument if the mesh names ranks outside the manager's world, or the options
  /// name an axis that the mesh does not have.
  DeviceMesh(Mesh mesh, DistributedManager manager, AxisGroupOptions options = {});
  /// Its axes and ranks.
  const Mesh& mesh() const;
  const DistributedManager& manager() const;
  /// True if this rank is in the mesh. Other ranks may hold the object, but have no coordinate and
  /// no groups.
  bool contains_me() const;
  /// This rank's position along each axis. Throws InvalidArgument on a rank outside the mesh, as
  /// group() does.
  std::vector<int> coordinate() const;
  /// The group along one axis through this rank; its rank in the group is its coordinate on that
  /// axis. Made on first use.
  Group group(const std::string& axis) const;
  Group group(int axis) const;
  /// The group over several axes through this rank, in mesh order. No axes: this rank alone.
  Group group(const std::vector<int>& axes) const;
  /// The group over all axes.
  Group all() const;
  /// True for the same layout and options of the same manager.
  bool operator==(const DeviceMesh& other) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
