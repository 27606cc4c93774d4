#include "tessera/gradient/internal/coalesced.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

namespace tessera {

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const Group& group) {
  constexpr std::int64_t kBytes = 25 << 20;
  const at::NoGradGuard no_grad;
  std::vector<BucketItem> items;
  for (const at::Tensor& t : tensors)
    items.push_back({static_cast<std::int64_t>(t.nbytes()),
                     static_cast<std::uint64_t>(t.scalar_type()) << 16 |
                         static_cast<std::uint64_t>(t.device().type()) << 8 |
                         static_cast<std::uint8_t>(t.device().index())});
  for (const auto& bucket : assign_buckets(items, kBytes, kBytes)) {
    std::vector<at::Tensor> flat_parts;
    for (std::size_t i : bucket) flat_parts.push_back(tensors[i].detach().reshape(-1));
    const at::Tensor flat = at::cat(flat_parts);
    group.broadcast(flat, 0, {.name = "broadcast_coalesced"});
    if (group.rank() == 0) continue;
    std::int64_t offset = 0;
    for (std::size_t i : bucket) {
      const at::Tensor target = tensors[i].detach();
      target.copy_(flat.narrow(0, offset, target.numel()).view(target.sizes()));
      offset += target.numel();
    }
  }
}

std::vector<std::vector<std::size_t>> assign_buckets(std::span<const BucketItem> items,
                                                     std::int64_t first_limit, std::int64_t limit) {
  struct Open {
    std::vector<std::size_t> members;
    std::int64_t bytes = 0;
    std::int64_t limit = 0;
  };
  std::vector<std::vector<std::size_t>> buckets;
  std::map<std::uint64_t, Open> open;
  // keys in order of first use: what is left open at the end is closed in an order all ranks share
  std::vector<std::uint64_t> order;
  for (std::size_t i = items.size(); i-- > 0;) {
    auto [at, fresh] = open.try_emplace(items[i].key);
    Open& bucket = at->second;
    if (fresh) {
      bucket.limit = first_limit;
      order.push_back(items[i].key);
    }
    bucket.members.push_back(i);
    bucket.bytes += items[i].bytes;
    if (bucket.bytes >= bucket.limit) {
      buckets.push_back(std::move(bucket.members));
      bucket = Open{{}, 0, limit};
    }
  }
  for (std::uint64_t key : order)
    if (!open[key].members.empty()) buckets.push_back(std::move(open[key].members));
  return buckets;
}

}  // namespace tessera
