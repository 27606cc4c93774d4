#pragma once
// What the tests of the mechanism share: everything is replicated, so that what differs from plain
// libtorch is the mechanism's fault, not a rule's.

#include "support.h"

namespace tessera::test {

inline DeviceMesh one_axis(DistributedManager& manager) {
  return manager.mesh({{"x", manager.world_size()}});
}

inline at::Tensor replicated(const at::Tensor& t, const DeviceMesh& mesh,
                             bool requires_grad = false) {
  return leaf(t, ShardSpec::replicated(mesh, t.sizes().vec()), requires_grad);
}

// Runs on a mesh of one and of two.
inline void everywhere(const std::function<void(DistributedManager&, const DeviceMesh&)>& body) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [&](DistributedManager& manager) { body(manager, one_axis(manager)); });
  }
}

}  // namespace tessera::test
