#pragma once
// DistributedManager: who am I, the world group, and every other group of this process, each made once. A value with shared state; several may live
// in one process (ranks as threads).

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/cluster/launch.h"
#include "tessera/comm/group.h"
#include "tessera/layout/mesh.h"

namespace tessera {

class DeviceMesh;
class CommTrace;

struct ManagerOptions {
  std::string backend;                          ///< CPU: "gloo" (default), "mpi"; CUDA tensors go to "nccl" where it is built and a GPU is there.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};   ///< Limit of every wait, unless a call gives its own.
  std::chrono::milliseconds rendezvous_timeout{std::chrono::minutes(2)};
  CheckLevel check_level = CheckLevel::local;
  std::optional<Launch> launch;                 ///< Instead of what the environment says.
};

namespace detail {
class ManagerState;
}

class DistributedManager {
 public:
  /// Reads the launcher's environment (or options.launch), meets the other ranks, makes the world group.
  static DistributedManager initialize(const ManagerOptions& options = {});
  explicit DistributedManager(std::shared_ptr<detail::ManagerState> state);

  int rank() const;
  int world_size() const;
  int local_rank() const;
  c10::Device device() const;                   ///< cuda:local_rank where the CUDA backend is in use, else cpu.
  const Launch& launch() const;

  Group world() const;
  /// The group of exactly these global ranks, in this order. Called by its members alone; made on first use, then reused.
  Group group(const std::vector<int>& ranks) const;
  DeviceMesh mesh(const Mesh& mesh) const;
  DeviceMesh mesh(const std::vector<Axis>& axes) const;  ///< Outermost first, over the whole world, row-major.

  /// Destroys every group made here, newest first. Collective. Later calls make them anew.
  void shutdown();

  const std::shared_ptr<detail::ManagerState>& state() const { return state_; }

 private:
  std::shared_ptr<detail::ManagerState> state_;
};

/// A mesh and its groups, as one rank sees them.
class DeviceMesh {
 public:
  DeviceMesh(Mesh mesh, DistributedManager manager);
  const Mesh& layout() const;
  const DistributedManager& manager() const;
  bool contains_me() const;                     ///< Ranks outside the mesh may hold it, but have no coordinate and no groups.
  std::vector<int> coordinate() const;          ///< This rank's, one number an axis.
  /// The group along one axis through this rank; rank in the group = coordinate on that axis. Made on first use.
  Group group(const std::string& axis) const;
  Group group(int axis) const;
  /// The group over several axes through this rank, in mesh order.
  Group group(const std::vector<int>& axes) const;
  Group all() const;                            ///< Over every axis.
  bool operator==(const DeviceMesh& other) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
