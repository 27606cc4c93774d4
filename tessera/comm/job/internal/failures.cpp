#include "tessera/comm/job/internal/failures.h"

#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera {

std::uint64_t failures_of(const DistributedManager& manager, const std::vector<int>& ranks) {
  return manager.state()->failures(ranks);
}

std::uint64_t failures_of(const DeviceMesh& mesh) {
  return failures_of(mesh.manager(), mesh.mesh().ranks());
}

bool has_ended(const Group& group) { return group.state()->watch().poison() != nullptr; }

}  // namespace tessera
