#pragma once
// ManagerState: the state that copies of a DistributedManager share.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/job/detail/failures.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/store.h"
#include "tessera/launch/launch.h"

namespace tessera::detail {

/// What a manager is built from: the processes' store and fault channel, or the hub of ranks as
/// threads.
struct ManagerBase {
  Launch launch;
  ManagerOptions options;
  /// "gloo", "shm", "mpi", "threads", "self", "auto".
  std::string backend;
  c10::Device device{c10::DeviceType::CPU};
  /// Where ranks are processes: the source of store, address and faults.
  std::optional<Rendezvous> rendezvous;
  /// Null where the backend needs none.
  c10::intrusive_ptr<c10d::Store> store;
  /// Numeric address of this host that listeners bind (GroupSpec::address).
  std::string address;
  /// May be null.
  std::shared_ptr<FaultChannel> faults;
  /// nullopt without MPI. Destroyed after the groups; ends MPI too if MPI was begun here.
  std::optional<MpiWorld> mpi;
  /// Makes a group, or returns null: make_group_state does. Empty: it always does. run_threads
  /// passes a function that captures its hub, manager_of() one that knows the program's backends.
  std::function<std::shared_ptr<GroupState>(const GroupSpec&)> make_group;
};

/// The device of a rank: `wanted`; else, where NCCL can run (`problem` is empty), the one of the
/// local rank among `devices`; else the CPU.
c10::Device choose_device(const std::optional<c10::Device>& wanted, int local_rank, int devices,
                          const std::string& problem);

/// Throws InvalidArgument for a time limit that is none, a backend that is neither one of the
/// library's for processes nor one of `backends`, or what cannot be used between hosts.
void check_options(const ManagerOptions& options, std::vector<std::string> backends);

/// The options that a plan's families give to groups along axes of a view.
AxisGroupOptions axis_options(const GroupPlan& plan, int view);

/// What groups of these ranks, with the manager's options, are called in errors and traces.
std::string name_of_ranks(const std::vector<int>& ranks, int world_size);

class ManagerState : public std::enable_shared_from_this<ManagerState>, Pinned {
 public:
  explicit ManagerState(ManagerBase base);
  ~ManagerState();

  const ManagerBase& base() const { return base_; }
  /// The group of these global ranks; made on first use by its members. Groups of different tags
  /// are different, even over the same ranks.
  std::shared_ptr<GroupState> group(const std::vector<int>& ranks, const GroupOptions& options = {},
                                    const std::string& tag = "");
  /// The group in which all ranks compare what must be the same everywhere. Over Gloo and shm it
  /// uses the job's store alone, at a cost per rank that does not grow with the world (a group over
  /// the world would connect each rank to every other); over other backends it is the world group.
  std::shared_ptr<GroupState> meeting_place();
  /// Destroys all groups, newest first.
  void shutdown();
  /// Reports that this rank failed alone: every group whose members all belong to `ranks` ends,
  /// here and on the other ranks, whose pending or next call throws PeerFailedError. The groups are
  /// made anew when they are asked for again.
  void fail_within(std::vector<int> ranks, const std::string& reason);
  /// How many failures of one rank alone, of meshes that hold all of `ranks`, have ended groups
  /// here: the same number on all of these ranks once each has caught its own error.
  std::uint64_t failures(const std::vector<int>& ranks) const;
  /// A number that grows whenever groups are destroyed.
  std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  /// The watch of a group that was made here, or null.
  std::shared_ptr<GroupWatch> watch(const std::string& group) const;
  /// The groups made so far.
  std::vector<std::shared_ptr<GroupState>> groups() const;

  void set_check_level(CheckLevel level);
  /// Traces the calls of every group, present and future; null: none.
  void set_trace(std::shared_ptr<CommTrace> trace);

  // ---- families by name ----
  /// Registers the families of a plan by name. Throws RepeatedName.
  void add_families(const GroupPlan& plan);
  /// This rank's group of the family. Throws UnknownName, and InvalidArgument if this rank is not
  /// in the family's mesh.
  Membership membership(const std::string& family) const;
  std::vector<std::string> family_names() const;
  /// Gives a mesh a name. Throws RepeatedName.
  void add_mesh(const std::string& name, const Mesh& mesh);
  /// The mesh that add_mesh() named, or that of a family through this rank. Throws as membership().
  std::pair<Mesh, AxisGroupOptions> named_mesh(const std::string& name) const;

 private:
  // ranks, backend, limit in ms, tag
  using Key = std::tuple<std::vector<int>, std::string, std::int64_t, std::string>;
  struct Made {
    std::mutex making;  // held while the group is made, by the first thread that asks
    std::shared_ptr<GroupState> state;
    std::shared_ptr<GroupWatch> watch;
  };
  std::vector<std::shared_ptr<Made>> all_made() const;
  std::string name_of(const Key& key, int round, std::uint64_t failures) const;
  std::shared_ptr<const GroupPlan> plan_of(const std::string& family, bool or_mesh) const;
  void check_members(const std::vector<int>& ranks) const;
  std::shared_ptr<GroupState> make(const Key& key, const std::shared_ptr<GroupWatch>& watch);
  void forget_keys(const GroupWatch& watch) const;
  void poison(const std::string& group, const Poison& poison);
  void hear_failure(const Failure& failure, const Poison& poison);
  void report_due_failures();
  void tell_failures_now();
  void tell_failure(const Failure& failure);
  // The poison of a failure: as `news`, and the first call that throws it ends the groups here.
  Poison poison_of(const Failure& failure, Poison news);
  // With the lock held: removes the groups within `ranks` from the table and returns their watches.
  std::vector<std::shared_ptr<GroupWatch>> retire_within(const std::vector<int>& ranks);
  void lost(int rank, bool on_purpose, const std::string& text);
  std::optional<Position> position(const std::string& group) const;

  ManagerBase base_;
  // guards all below; never held while a group is made or a watch is notified
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Made>> made_;
  std::vector<std::shared_ptr<Made>> order_;  // as made, so that shutdown can go backwards
  // how often a group was made: a part of its name, since an earlier one may have left keys in the
  // store
  std::map<Key, int> rounds_;
  std::map<std::string, Poison> early_;               // for groups that this rank has not made yet
  std::map<int, std::pair<bool, std::string>> lost_;  // rank -> on purpose, how
  bool fault_ = false;
  Failures failures_;
  // failures of other ranks by the time when they are due, and the thread that reports them
  std::mutex delayed_mutex_;
  std::condition_variable delayed_changed_;
  std::deque<std::pair<std::chrono::steady_clock::time_point, Failure>> delayed_;
  bool reporter_stops_ = false;
  std::thread reporter_;
  CheckLevel level_;
  std::shared_ptr<CommTrace> trace_;
  std::vector<std::pair<std::string, std::shared_ptr<const GroupPlan>>> families_;
  std::map<std::string, Mesh> meshes_;
  std::atomic<std::uint64_t> generation_{0};
};

}  // namespace tessera::detail
