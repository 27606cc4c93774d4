#include "tessera/comm/job/device_mesh.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera {

struct DeviceMesh::State {
  Mesh mesh;
  DistributedManager manager;
  AxisGroupOptions options;
  std::mutex mutex;                          // guards the two below
  std::map<std::vector<int>, Group> groups;  // by sorted axes: asking again costs one look-up
  std::uint64_t generation = 0;              // of the manager's groups when these were made
};

DeviceMesh::DeviceMesh(Mesh mesh, DistributedManager manager, AxisGroupOptions options)
    : state_(new State{std::move(mesh), std::move(manager), std::move(options), {}, {}, 0}) {
  for (const auto& [axes, ignored] : state_->options)
    if (!std::ranges::is_sorted(axes) ||
        std::ranges::any_of(axes, [&](int a) { return a < 0 || a >= state_->mesh.dims(); }))
      throw InvalidArgument("group options for the axes ", list(axes), " of the mesh ",
                            state_->mesh.to_string(),
                            "; name axes by their indices in ascending order");
  const int world = state_->manager.world_size();
  for (const int rank : state_->mesh.ranks())
    if (rank >= world)
      throw InvalidArgument("rank ", rank, " of the mesh is not in a world of ", world,
                            " ranks; give ranks 0 to ", world - 1);
}

const Mesh& DeviceMesh::mesh() const { return state_->mesh; }

const DistributedManager& DeviceMesh::manager() const { return state_->manager; }

bool DeviceMesh::contains_me() const { return state_->mesh.contains(state_->manager.rank()); }

std::vector<int> DeviceMesh::coordinate() const {
  return state_->mesh.coordinate(state_->manager.rank());
}

Group DeviceMesh::group(const std::string& axis) const {
  return group(std::vector<int>{state_->mesh.index(axis)});
}

Group DeviceMesh::group(int axis) const { return group(std::vector<int>{axis}); }

Group DeviceMesh::group(const std::vector<int>& axes) const {
  auto key = axes;
  std::ranges::sort(key);
  const auto generation = state_->manager.state()->generation();
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->generation != generation) state_->groups.clear();
    state_->generation = generation;
    if (const auto at = state_->groups.find(key); at != state_->groups.end()) return at->second;
  }
  // Outside the lock: making a group waits for its other members.
  const auto options = state_->options.find(key);
  Group made =
      state_->manager.group(state_->mesh.group(key, state_->manager.rank()),
                            options == state_->options.end() ? GroupOptions{} : options->second);
  const std::lock_guard lock(state_->mutex);
  return state_->groups.emplace(std::move(key), made).first->second;
}

Group DeviceMesh::all() const { return group(numbers_below(state_->mesh.dims())); }

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return state_ == other.state_ ||
         (state_->manager == other.state_->manager && state_->mesh == other.state_->mesh &&
          state_->options == other.state_->options);
}

}  // namespace tessera
