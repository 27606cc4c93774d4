#include "tessera/gradient/detail/bucket.h"

#include <map>

namespace tessera {

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
