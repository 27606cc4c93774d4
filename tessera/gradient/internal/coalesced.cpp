#include "tessera/gradient/internal/coalesced.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/gradient/detail/bucket.h"

namespace tessera {

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const Group& group, int root,
                         std::int64_t bytes) {
  const at::NoGradGuard no_grad;
  std::vector<BucketItem> items;
  for (const at::Tensor& t : tensors)
    items.push_back({static_cast<std::int64_t>(t.nbytes()),
                     static_cast<std::uint64_t>(t.scalar_type()) << 16 |
                         static_cast<std::uint64_t>(t.device().type()) << 8 |
                         static_cast<std::uint8_t>(t.device().index())});
  for (const auto& bucket : assign_buckets(items, bytes, bytes)) {
    std::vector<at::Tensor> flat_parts;
    for (std::size_t i : bucket) flat_parts.push_back(tensors[i].detach().reshape(-1));
    const at::Tensor flat = at::cat(flat_parts);
    group.broadcast(flat, root, {.name = "broadcast_coalesced"});
    if (group.rank() == root) continue;
    std::int64_t offset = 0;
    for (std::size_t i : bucket) {
      const at::Tensor target = tensors[i].detach();
      target.copy_(flat.narrow(0, offset, target.numel()).view(target.sizes()));
      offset += target.numel();
    }
  }
}

}  // namespace tessera
