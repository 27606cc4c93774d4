#pragma once
// What all copies of a DistributedManager share.

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

#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/job/detail/failures.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/store.h"
#include "tessera/launch/launch.h"

namespace tessera::detail {

/// What a manager stands on: the processes' store and fault channel, or the hub of ranks as
/// threads.
struct ManagerBase {
  Launch launch;
  ManagerOptions options;
  /// "gloo", "shm", "mpi", "threads", "self".
  std::string backend;
  c10::Device device{c10::DeviceType::CPU};
  /// Of processes: gives store, address and faults.
  std::optional<Rendezvous> rendezvous;
  /// Null where the backend needs none.
  c10::intrusive_ptr<c10d::Store> store;
  /// GroupSpec::address.
  std::string address;
  /// May be null.
  std::shared_ptr<FaultChannel> faults;
  /// May be null.
  std::shared_ptr<CommTrace> trace;
  /// Nothing without MPI; ends after the groups, and MPI with it if it was begun here.
  std::optional<MpiWorld> mpi;
  /// Makes a group; empty: make_group_state. run_threads gives one that captures its hub.
  std::function<std::shared_ptr<GroupState>(const GroupSpec&)> make_group;
  /// Tells the manager's watches what the fault channel hears; called once with the receiver (group
  /// name or "" for all; poison).
  std::function<void(std::function<void(const std::string& group, const Poison& poison)>)> listen;
};

/// The device of a rank: `wanted`, or the one of the local rank among `devices` where NCCL has no
/// `problem`, or the CPU.
c10::Device choose_device(const std::optional<c10::Device>& wanted, int local_rank, int devices,
                          const std::string& problem);

/// The options that a plan's families give to groups along axes of a view.
AxisGroupOptions axis_options(const GroupPlan& plan, int view);

class ManagerState : public std::enable_shared_from_this<ManagerState> {
 public:
  explicit ManagerState(ManagerBase base);
  ~ManagerState();
  ManagerState(const ManagerState&) = delete;
  ManagerState& operator=(const ManagerState&) = delete;

  const ManagerBase& base() const { return base_; }
  /// The group of these global ranks; made on first use by its members. Groups of different tags
  /// are different, even of the same ranks.
  std::shared_ptr<GroupState> group(const std::vector<int>& ranks, const GroupOptions& options = {},
                                    const std::string& tag = "");
  /// Where all ranks meet to compare what must be the same everywhere: over Gloo and shm the job's
  /// store alone, at a cost for a rank that does not grow with the world (a group over the world
  /// would connect each rank to every other); over other backends the world group.
  std::shared_ptr<GroupState> meeting_place();
  /// Destroys all groups, newest first.
  void shutdown();
  /// This rank failed alone: every group whose members all belong to `ranks` ends here and on the
  /// others, whose pending or next call throws PeerFailedError, and is made anew when it is asked
  /// for again.
  void fail_within(std::vector<int> ranks, const std::string& reason);
  /// Grows whenever groups are destroyed.
  std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  /// The watch of a group that was made here, or null.
  std::shared_ptr<GroupWatch> watch(const std::string& group) const;
  /// The groups that are made.
  std::vector<std::shared_ptr<GroupState>> groups() const;

  void set_check_level(CheckLevel level);
  /// Of every group, now and later; null: off.
  void set_trace(std::shared_ptr<CommTrace> trace);

  // ---- families by name ----
  /// Throws RepeatedName.
  void add_families(const GroupPlan& plan);
  /// This rank's group of the family. Throws UnknownName, and InvalidArgument if this rank is not
  /// in the family's mesh.
  Membership membership(const std::string& family) const;
  std::vector<std::string> family_names() const;
  /// Throws RepeatedName.
  void add_mesh(const std::string& name, const Mesh& mesh);
  /// What add_mesh() named, or the mesh of a family through this rank. Throws as membership().
  std::pair<Mesh, AxisGroupOptions> named_mesh(const std::string& name) const;

 private:
  // ranks, backend, limit in ms, tag
  using Key = std::tuple<std::vector<int>, std::string, std::int64_t, std::string>;
  struct Made {
    Key key;
    std::mutex making;  // held while the group is made, by the first thread that asks
    std::shared_ptr<GroupState> state;
    std::shared_ptr<GroupWatch> watch;
  };
  std::string name_of(const Key& key, int round, std::uint64_t failures) const;
  std::shared_ptr<const GroupPlan> plan_of(const std::string& family, bool or_mesh) const;
  void check_members(const std::vector<int>& ranks) const;
  std::shared_ptr<GroupState> make(const Key& key, const std::shared_ptr<GroupWatch>& watch);
  void forget_keys(const GroupWatch& watch) const;
  void poison(const std::string& group, const Poison& poison);
  void hear_failure(const Failure& failure, const Poison& poison);
  void ripen_failures();
  void tell_failures_now();
  void tell_failure(const Failure& failure);
  // `news`, whose first call to throw ends the groups here.
  Poison poison_of(const Failure& failure, Poison news);
  // With the lock held: the watches of those groups, which are no longer found by their ranks.
  std::vector<std::shared_ptr<GroupWatch>> retire_within(const std::vector<int>& ranks);
  void lost(int rank, bool on_purpose, const std::string& text);
  std::optional<Position> position(const std::string& group) const;

  ManagerBase base_;
  // guards all below; never held while a group is made or a watch is told
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Made>> made_;
  std::vector<std::shared_ptr<Made>> order_;  // as made, so that shutdown goes backwards
  // how often a group was made: a part of its name, for what an earlier one left in the store
  std::map<Key, int> rounds_;
  std::map<std::string, Poison> early_;               // of groups that this rank has not made
  std::map<int, std::pair<bool, std::string>> lost_;  // rank -> on purpose, how
  bool fault_ = false;
  const std::unique_ptr<Failures> failures_ = std::make_unique<Failures>();
  // failures that were heard, by when they are told, and the thread that tells them
  std::mutex ripening_mutex_;
  std::condition_variable ripening_changed_;
  std::deque<std::pair<std::chrono::steady_clock::time_point, Failure>> ripening_;
  bool ripening_ended_ = false;
  std::thread ripener_;
  CheckLevel level_;
  std::shared_ptr<CommTrace> trace_;
  std::vector<std::pair<std::string, std::shared_ptr<const GroupPlan>>> families_;
  std::map<std::string, Mesh> meshes_;
  std::atomic<std::uint64_t> generation_{0};
};

}  // namespace tessera::detail
