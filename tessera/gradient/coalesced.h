#pragma once
// Many small tensors in few messages.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Every rank's tensors get root's values. Tensors of one dtype and device travel together, at most
/// `bytes` a message (a larger tensor has its own). Collective; the ranks' tensors agree in number,
/// shape, dtype and order.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const Group& group, int root,
                         std::int64_t bytes = 25 << 20);

}  // namespace tessera
