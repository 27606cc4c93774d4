#pragma once
// GroupSpec: what a manager asks for when it makes a group.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/types.h"

namespace tessera {
class CommTrace;
class MpiWorld;
}  // namespace tessera

namespace tessera::detail {

class GroupState;

struct GroupSpec {
  std::string name;                          ///< Of this member list, unique in the job.
  std::vector<int> ranks;                    ///< Global, in group order.
  int rank = 0;                              ///< Position of this process in `ranks`.
  std::string backend;                       ///< For CPU tensors: "gloo", "mpi", "threads", "self"; "store": none, the ranks only meet at the store.
  c10::Device device{c10::DeviceType::CPU};  ///< CUDA: tensors of that device go to NCCL.
  std::string address;                       ///< Numeric address of this host that listeners must bind, and no other.
  c10::intrusive_ptr<c10d::Store> store;     ///< Of this group alone. Null for backends that need none.
  std::chrono::milliseconds timeout{0};
  CheckLevel check_level = CheckLevel::local;
  std::shared_ptr<GroupWatch> watch;  ///< Never null.
  std::shared_ptr<CommTrace> trace;   ///< Null: off.
  std::shared_ptr<MpiWorld> mpi;      ///< Of "mpi" alone: its ranks are the global ranks.
};

/// Makes the group in this process; the other members do the same. Throws CommError if the members do not meet within the time limit.
std::shared_ptr<GroupState> make_group_state(const GroupSpec& spec);

}  // namespace tessera::detail
