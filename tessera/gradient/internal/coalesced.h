#pragma once
// Many small tensors in few messages.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Broadcasts tensors from `root` to the other ranks of the group, which overwrite theirs. Tensors
/// of one dtype and device are sent together, at most `bytes` per message (a larger tensor has a
/// message of its own). Collective; the ranks' tensors agree in number, shape, dtype and order.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const Group& group, int root,
                         std::int64_t bytes = 25 << 20);

}  // namespace tessera
