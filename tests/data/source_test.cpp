// The part of Source that all sources share: completing and checking a hyperslab.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <random>

#include "tessera/base/text.h"
#include "tessera/data/sources/source.h"

namespace tessera::source_test {
namespace {

TEST(CompleteSlab, FillsWhatIsLeftOut) {
  const Hyperslab slab = complete_slab({{2}, {3}, {}}, {10, 4}, {"t", "x"}, "u");
  EXPECT_EQ(slab.start, (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(slab.count, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(slab.stride, (std::vector<std::int64_t>{1, 1}));
  EXPECT_TRUE(complete_slab({}, {}, {}, "scalar").start.empty());
}

TEST(CompleteSlab, AcceptsExactlyWhatLiesInside) {
  for (std::int64_t size = 0; size < 6; ++size)
    for (std::int64_t start = -1; start < 8; ++start)
      for (std::int64_t count = -1; count < 8; ++count)
        for (std::int64_t stride = -1; stride < 4; ++stride) {
          bool inside = start >= 0 && start <= size && count >= 0 && stride >= 1;
          for (std::int64_t i = 0; i < count; ++i) inside = inside && start + i * stride < size;
          if (inside)
            EXPECT_NO_THROW(complete_slab({{start}, {count}, {stride}}, {size}, {"x"}, "u"))
                << concat(size, " ", start, " ", count, " ", stride);
          else
            EXPECT_THROW(complete_slab({{start}, {count}, {stride}}, {size}, {"x"}, "u"),
                         RangeError)
                << concat(size, " ", start, " ", count, " ", stride);
        }
}

TEST(CompleteSlab, DoesNotOverflow) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(complete_slab({{1}, {huge}, {huge}}, {10}, {"x"}, "u"), RangeError);
  EXPECT_THROW(complete_slab({{huge}, {1}, {1}}, {10}, {"x"}, "u"), RangeError);
  EXPECT_NO_THROW(complete_slab({{9}, {1}, {huge}}, {10}, {"x"}, "u"));
}

TEST(CompleteSlab, ListsOfDifferentLengths) {
  EXPECT_THROW(complete_slab({{1, 2}, {1}, {}}, {10, 4}, {"t", "x"}, "u"), InvalidArgument);
  EXPECT_THROW(complete_slab({{1}, {1}, {1, 1}}, {10, 4}, {"t", "x"}, "u"), InvalidArgument);
  EXPECT_THROW(complete_slab({{0, 0, 0}, {1, 1, 1}, {}}, {10, 4}, {"t", "x"}, "u"),
               InvalidArgument);
}

TEST(CompleteSlab, SaysWhatWasAskedAndWhatThereIs) {
  try {
    complete_slab({{0, 3}, {10, 2}, {1, 2}}, {10, 5}, {"t", "x"}, "u in f.nc");
    FAIL();
  } catch (const RangeError& error) {
    EXPECT_STREQ(
        error.what(),
        "dimension x of u in f.nc has 5 indices, 0 to 4; asked for 2 from 3 with stride 2");
  }
}

}  // namespace
}  // namespace tessera::source_test
