#include "tessera/gradient/internal/coalesced.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace tessera {
namespace {

TEST(Buckets, HoldEveryItemOnceByKeyAndInBackwardOrder) {
  std::mt19937_64 random(1);
  for (int n = 0; n < 2000; ++n) {
    std::vector<BucketItem> items(random() % 30);
    for (auto& item : items) item = {static_cast<std::int64_t>(random() % 50), random() % 3};
    const auto first = static_cast<std::int64_t>(1 + random() % 20),
               limit = static_cast<std::int64_t>(1 + random() % 100);
    std::set<std::size_t> seen;
    std::set<std::uint64_t> keys;
    for (const auto& bucket : assign_buckets(items, first, limit)) {
      ASSERT_FALSE(bucket.empty());
      const auto key = items[bucket.front()].key;
      std::int64_t bytes = 0;
      for (std::size_t i = 0; i < bucket.size(); ++i) {
        EXPECT_TRUE(seen.insert(bucket[i]).second);
        EXPECT_EQ(items[bucket[i]].key, key);
        if (i > 0) {
          EXPECT_LT(bucket[i], bucket[i - 1]);
          // closed as soon as the limit is reached: without its last item it is below
          EXPECT_LT(bytes, keys.contains(key) ? limit : first);
        }
        bytes += items[bucket[i]].bytes;
      }
      keys.insert(key);
    }
    EXPECT_EQ(seen.size(), items.size());
  }
}

TEST(Buckets, TheExampleOfTheHeader) {
  const std::vector<BucketItem> items{{4, 0}, {4, 0}, {4, 0}};
  EXPECT_EQ(assign_buckets(items, 4, 8), (std::vector<std::vector<std::size_t>>{{2}, {1, 0}}));
}

}  // namespace
}  // namespace tessera
