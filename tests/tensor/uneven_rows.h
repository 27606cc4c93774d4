#pragma once
// Rows over three ranks, of which one has none.

#include <functional>

#include "support.h"

namespace tessera::test {

const Sizes kUneven{3, 0, 2};

// Three ranks, rows {3, 0, 2}.
inline void on_three(const std::function<void(DistributedManager&, const DeviceMesh&)>& body) {
  on_ranks(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    body(manager, manager.mesh({{"x", 3}}));
  });
}

inline at::Tensor by_rows(const at::Tensor& value, const DeviceMesh& mesh,
                          bool requires_grad = false) {
  return leaf(value, ShardSpec(mesh, value.sizes().vec(), {Shard(0)}, {{0, kUneven}}),
              requires_grad);
}

}  // namespace tessera::test
