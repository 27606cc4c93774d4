#pragma once
// What all copies of a DistributedManager share.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/cluster/launch.h"
#include "tessera/comm/detail/group_spec.h"
#include "tessera/comm/manager.h"

namespace tessera::detail {

/// What a manager stands on: the processes' store and fault channel, or the hub of ranks as threads.
struct ManagerBase {
  Launch launch;
  ManagerOptions options;
  std::string backend;                                     ///< "gloo", "mpi", "threads", "self".
  c10::Device device{c10::DeviceType::CPU};
  c10::intrusive_ptr<c10d::Store> store;                   ///< Null where the backend needs none.
  std::string address;                                     ///< GroupSpec::address.
  std::shared_ptr<FaultChannel> faults;                    ///< May be null.
  std::shared_ptr<CommTrace> trace;                        ///< May be null.
  /// Makes a group; empty: make_group_state. run_threads gives one that captures its hub.
  std::function<std::shared_ptr<GroupState>(const GroupSpec&)> make_group;
  /// Tells the manager's watches what the fault channel hears; called once with the receiver (group name or "" for all; poison).
  std::function<void(std::function<void(const std::string& group, const Poison& poison)>)> listen;
};

class ManagerState {
 public:
  explicit ManagerState(ManagerBase base);
  ~ManagerState();
  ManagerState(const ManagerState&) = delete;
  ManagerState& operator=(const ManagerState&) = delete;

  const ManagerBase& base() const { return base_; }
  /// The group of these global ranks; made on first use by its members.
  std::shared_ptr<GroupState> group(const std::vector<int>& ranks);
  /// Destroys all groups, newest first.
  void shutdown();
  /// The watch of a group that was made here, or null.
  std::shared_ptr<GroupWatch> watch(const std::string& group) const;

 private:
  struct Made {
    std::shared_ptr<GroupState> state;
    std::shared_ptr<GroupWatch> watch;
  };
  void poison(const std::string& group, const Poison& poison);

  ManagerBase base_;
  mutable std::mutex mutex_;
  std::map<std::vector<int>, Made> groups_;
  std::vector<std::vector<int>> order_;   // as made, so that shutdown goes backwards
  std::uint64_t generation_ = 0;
};

}  // namespace tessera::detail
