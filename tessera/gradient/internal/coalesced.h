#pragma once
// Many small tensors in few messages.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Broadcasts tensors from the group's first rank to the others, which overwrite theirs. Tensors of
/// one dtype and device are sent together, about 25 MiB per message (a larger tensor has a message
/// of its own). Collective; the ranks' tensors agree in number, shape, dtype and order.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const Group& group);

// Which gradients share a bucket. Arithmetic only.

/// One gradient: its bytes, and a key that separates what cannot share a message (dtype, device,
/// group, operation).
struct BucketItem {
  std::int64_t bytes;
  std::uint64_t key;
};

/// Buckets of item indices, in the order in which backward is expected to finish them: last item
/// first. A bucket is closed when it holds at least its limit; the first bucket of a key has a
/// smaller one, so that communication starts early. An item larger than the limit has a bucket of
/// its own size.
///
///   assign_buckets({{4, 0}, {4, 0}, {4, 0}}, 4, 8) -> {{2}, {1, 0}}
std::vector<std::vector<std::size_t>> assign_buckets(std::span<const BucketItem> items,
                                                     std::int64_t first_limit, std::int64_t limit);

}  // namespace tessera
