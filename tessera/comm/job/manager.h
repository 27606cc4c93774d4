#pragma once
// DistributedManager: this process' rank, the world group, and every other group of this process,
// each made once. A value with shared state; several may exist in one process (ranks as threads).
//
//   auto manager = DistributedManager::initialize();
//   Group world = manager.world();
//   Group pair = manager.group({0, 3});              // called by ranks 0 and 3 alone
//   auto mesh = manager.mesh({{"data", 2}, {"model", 2}});
//   Group model = mesh.group("model");
//   manager.create_process_groups(tree);             // all groups of a configuration tree
//   manager.create_process_groups<UNet>({{"domain", 2}});  // those that a model says it needs
//   auto domain = manager.mesh("domain");            // the node "domain" of the tree, as a mesh
//
// Groups are made on first use, by their members alone: the cost for a rank depends on the group's
// size, not on the world's.
//
// Destruction. The destructor of the last copy destroys the groups and deregisters this rank from
// the job. Rank 0, which serves the job's store, waits there until the others have deregistered (at
// most ManagerOptions::timeout; 3 seconds once a fault is known). If it runs because an exception
// unwinds the stack, the other ranks' pending and later calls throw PeerLostError.

#include <c10/core/Device.h>

#include <chrono>
#include <concepts>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/group/group.h"
#include "tessera/launch/launch.h"
#include "tessera/mesh/groups/group_plan.h"
#include "tessera/mesh/groups/model_groups.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

class DeviceMesh;

struct ManagerOptions {
  /// The backend for CPU tensors: "auto" (default), "gloo", "shm", "mpi". With "auto" each group
  /// goes through memory where all its ranks share a host, over Gloo where no two do, and otherwise
  /// through memory inside a host and over Gloo between hosts; Group::backend() and
  /// backend_reason() say which it is. CUDA tensors go to "nccl" where it is built and a GPU is
  /// present.
  std::string backend = {};
  /// What collectives of "auto" groups go over between hosts; messages between hosts always go over
  /// Gloo. "auto" (default): MPI where `mpi` is given, else Gloo. "mpi": MPI, which is initialised
  /// here at the thread level `multiple` unless `mpi` is given; the job must have been started by
  /// MPI's own launcher. "gloo". The same on all ranks.
  std::string between_hosts = "auto";
  /// Time limit of every wait, unless a call gives its own; milliseconds::max() waits for ever.
  std::chrono::milliseconds timeout = kDefaultLimit;
  std::chrono::milliseconds rendezvous_timeout{std::chrono::minutes(2)};
  CheckLevel check_level = CheckLevel::local;
  /// Replaces what the environment says.
  std::optional<Launch> launch = {};
  /// The device of this rank. Default: cuda:(local rank % devices) where the NCCL part can run,
  /// else the CPU. A CUDA device where NCCL cannot run throws NotAvailable.
  std::optional<c10::Device> device = {};
  /// Ranks of MPI: the backend is then "mpi" unless another one is named: "auto", with a `launch`,
  /// uses them between hosts alone. The world consists of these ranks, for a communicator of the
  /// program those of mpi_world() (mpi_interop.h); no store, no sockets and no launcher's
  /// environment are used. With a `launch` as well (rank, world size, address, port among others)
  /// the ranks also share a store, which other backends and news of lost ranks need:
  ///   options.launch = detect_launch({}, {.rank = mpi->rank(), .world_size = mpi->size(), .address
  ///     = host_of_rank_0, .port = port});
  std::optional<MpiWorld> mpi = {};
};

namespace detail {
class ManagerState;
}

class DistributedManager {
 public:
  /// Reads the launcher's environment (or options.launch) and meets the other ranks. Throws
  /// ConfigurationError (environment), RendezvousError.
  static DistributedManager initialize(const ManagerOptions& options = {});
  explicit DistributedManager(std::shared_ptr<detail::ManagerState> state);

  int rank() const;
  int world_size() const;
  int local_rank() const;
  /// The device of this rank: ManagerOptions::device or its default.
  c10::Device device() const;
  const Launch& launch() const;

  Group world() const;
  /// The group of exactly these global ranks, in this order. Called by its members alone; made on
  /// first use, then reused. Throws InvalidArgument if this rank is not a member, if a rank is
  /// listed twice, or if one is not in the world.
  Group group(const std::vector<int>& ranks) const;
  /// The group has a backend or a time limit of its own: it is different from the one without
  /// options, even over the same ranks.
  Group group(const std::vector<int>& ranks, const GroupOptions& options) const;
  DeviceMesh mesh(const Mesh& mesh) const;
  /// A mesh over the whole world, row-major; the outermost axis comes first. One axis may be open:
  /// {{"data", kOpenAxis}, {"domain", 2}}.
  DeviceMesh mesh(const std::vector<Axis>& axes) const;
  /// The mesh of a plan (its first view), with the options of the plan's families.
  DeviceMesh mesh(const GroupPlan& plan) const;
  /// A mesh by name: one that add_mesh() named, or the ranks of a family of create_process_groups()
  /// that this rank belongs to, with the family's axes. For a configuration tree it may be any
  /// node; it has one axis per leaf below the node, and its groups are those of the tree's nodes.
  /// So a module asks for "domain" and needs no mesh from its caller. Throws UnknownName with the
  /// known names, and InvalidArgument if this rank is not in the family's mesh.
  template <std::convertible_to<std::string> Name>
  auto mesh(const Name& name) const {  // a DeviceMesh, which is complete below
    return named_mesh(name);
  }
  /// Gives a mesh a name. Not collective, but all ranks that use the name must name the same mesh.
  /// Throws RepeatedName if another mesh or a family has the name, InvalidArgument as mesh() does.
  void add_mesh(const std::string& name, const Mesh& mesh) const;

  /// Registers the families of a plan by name (collective over the world). All ranks compare their
  /// plans first: if they differ, every rank throws MismatchError with the first line that differs,
  /// and no name is added. Groups are made on first use, or now if `eager`. Throws RepeatedName for
  /// a name that is taken, unless the family is the same.
  void create_process_groups(const GroupPlan& plan, bool eager = false) const;
  /// Registers the plan of a configuration tree over the whole world: one family per node, and one
  /// per orthogonal group. Two trees may have roots of one name over the same ranks: they are one
  /// family, and mesh() of that name has the axes of the tree that came first.
  void create_process_groups(const ProcessGroupConfig& config, bool eager = false) const;
  /// Registers what a model says it needs (see model_groups.h), with these sizes of its leaves.
  /// Throws UnknownName for a leaf that its tree lacks.
  template <SaysProcessGroups Model>
  void create_process_groups(const std::map<std::string, int>& sizes = {},
                             bool eager = false) const {
    create_process_groups(process_groups_of<Model>(sizes), eager);
  }
  /// The tree is mapped: `ranks[i]` is at the i-th coordinate of config.mesh(world_size).
  void create_process_groups(const ProcessGroupConfig& config, const std::vector<int>& ranks,
                             bool eager = false) const;
  /// The ranks are mapped to the machines for the given traffic (axes are the leaves' names); see
  /// optimise_mapping(). Rank r runs on slot r of the topology, as launchers fill hosts one after
  /// the other; without traffic the order of the ranks is kept. Returns the mapping that it chose.
  /// Throws MappingError if slots and ranks differ in number.
  RankMapping create_process_groups(const ProcessGroupConfig& config, const Topology& topology,
                                    const std::vector<Traffic>& traffic = {},
                                    bool eager = false) const;
  /// This rank's group of a family. Throws UnknownName with the known names.
  template <std::convertible_to<std::string> Name>
  Group group(const Name& family) const {
    return named_group(family);
  }
  /// Size of this rank's group of a family, without making the group.
  int group_size(const std::string& family) const;
  int group_rank(const std::string& family) const;
  /// The names of families in the order in which they were created.
  std::vector<std::string> group_names() const;

  /// Sets the check level of every group made here, now and later. All ranks must set the same.
  void set_check_level(CheckLevel level) const;
  /// Tells the other ranks of `ranks` that this one met an error that they may not see: the pending
  /// or next call of each, on any group whose members all belong to `ranks`, throws PeerFailedError
  /// with `reason`, once. Those groups are made anew when they are asked for again. Failures of
  /// several ranks at one time count as one.
  void fail_groups_within(const Mesh& ranks, const std::string& reason) const;
  /// Destroys every group made here, newest first. Collective. Later calls make them anew; Group
  /// values from before throw CommError.
  void shutdown();

  const std::shared_ptr<detail::ManagerState>& state() const { return state_; }
  bool operator==(const DistributedManager& other) const { return state_ == other.state_; }

 private:
  Group named_group(const std::string& family) const;
  DeviceMesh named_mesh(const std::string& name) const;

  std::shared_ptr<detail::ManagerState> state_;
};

}  // namespace tessera

#include "tessera/comm/job/device_mesh.h"  // what mesh() returns
