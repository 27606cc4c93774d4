#include "tessera/tensor/spec/failures.h"

#include "tessera/comm/job/detail/manager_state.h"

namespace tessera::detail {

std::uint64_t failures_of(const DistributedManager& manager, const std::vector<int>& ranks) {
  return manager.state()->failures(ranks);
}

std::uint64_t failures_of(const DeviceMesh& mesh) {
  return failures_of(mesh.manager(), mesh.layout().ranks());
}

}  // namespace tessera::detail
