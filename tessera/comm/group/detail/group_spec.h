#pragma once
// GroupSpec: what a manager asks for when it makes a group.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/types.h"

namespace tessera {
class CommTrace;
}  // namespace tessera

namespace tessera::detail {

class GroupState;

struct GroupSpec {
  /// Name of this list of members, unique in the job.
  std::string name;
  /// Global ranks in group order.
  std::vector<int> ranks;
  /// Position of this process in `ranks`.
  int rank = 0;
  /// The backend for CPU tensors: "gloo", "shm", "mpi", "threads", "self"; "auto": by where the
  /// ranks are (make_transport_by_host()); "store": none, the ranks only meet at the store.
  std::string backend;
  /// For "auto": HostsOptions::host.
  std::string host;
  /// CUDA: tensors on that device go to NCCL.
  c10::Device device{c10::DeviceType::CPU};
  /// Numeric address of this host that listeners bind, and no other.
  std::string address;
  /// A store for this group alone. Null for backends that need none.
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout{0};
  CheckLevel check_level = CheckLevel::local;
  /// Never null.
  std::shared_ptr<GroupWatch> watch;
  /// Null: calls are not traced.
  std::shared_ptr<CommTrace> trace;
  /// For "mpi", and for "auto" between hosts: its ranks are the global ranks.
  std::optional<MpiWorld> mpi;
  /// For "auto": HostsOptions::between.
  std::string between = "auto";
};

/// Makes the group in this process; the other members call it as well. Throws CommError if the
/// members do not meet within the time limit.
std::shared_ptr<GroupState> make_group_state(const GroupSpec& spec);
/// Calls make_group_state(spec) in a thread of its own. Gloo has two waits that no other thread can
/// end: for the connections of members that died after they had published their address, and (five
/// times the limit) for members that do not accept. Where the group is abandoned or its limit is
/// over, the thread is left behind and ends when Gloo's wait does. `interrupt` wakes what waits at
/// the store.
///
/// Throws what make_group_state throws, PeerLostError and TimeoutError.
std::shared_ptr<GroupState> make_group_in_time(const GroupSpec& spec,
                                               std::function<void()> interrupt);
/// True for backends whose ranks find each other through the job's store.
bool met_at_store(const std::string& backend);

}  // namespace tessera::detail
