#pragma once
// Random hyperslabs against plain indexing of the complete variable.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "tessera/data/sources/source.h"

namespace tessera::testing {

inline void expect_slabs(const Source& source, const std::string& variable, const at::Tensor& whole,
                         int cases) {
  std::mt19937_64 random(7);
  auto number = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  for (int n = 0; n < cases; ++n) {
    Hyperslab slab;
    at::Tensor wanted = whole;
    const auto dims = number(0, whole.dim());
    for (std::int64_t d = 0; d < dims; ++d) {
      const std::int64_t size = whole.size(d), start = number(0, size), stride = number(1, 3);
      const std::int64_t count = number(0, start < size ? (size - 1 - start) / stride + 1 : 0);
      slab.start.push_back(start);
      slab.count.push_back(count);
      slab.stride.push_back(stride);
      wanted = count == 0 ? wanted.narrow(d, 0, 0)
                          : wanted.slice(d, start, start + (count - 1) * stride + 1, stride);
    }
    const auto read = source.read(variable, slab, {.dtype = at::kDouble});
    ASSERT_TRUE(read.is_contiguous());
    ASSERT_TRUE(at::equal(read, wanted.to(at::kDouble))) << variable << ", case " << n;
  }
}

}  // namespace tessera::testing
