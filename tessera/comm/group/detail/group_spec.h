#pragma once
// GroupSpec: what a manager asks for when it makes a group.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/backends/hosts/hosts.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/types.h"

namespace tessera {
class CommTrace;
}  // namespace tessera

namespace tessera::detail {

class GroupState;

/// `name`, unique in the job for this list of members, `ranks` and `watch` are always given. `mpi`
/// is for "mpi" too, at any thread level.
struct GroupSpec : HostsOptions {
  /// Position of this process in `ranks`.
  int rank = 0;
  /// The backend for CPU tensors: "gloo", "shm", "mpi", "threads", "self"; "auto": by where the
  /// ranks are (make_transport_by_host()); "store": none, the ranks only meet at the store.
  std::string backend;
  /// CUDA: tensors on that device go to NCCL.
  c10::Device device{c10::DeviceType::CPU};
  /// A store for this group alone. Null for backends that need none.
  c10::intrusive_ptr<c10d::Store> store;
  CheckLevel check_level = CheckLevel::local;
  /// Null: calls are not traced.
  std::shared_ptr<CommTrace> trace;
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
