#pragma once
// What a rank holds in a case, which all ranks can work out, and ranks that all ended well.

#include <cstddef>
#include <random>
#include <vector>

#include "ranks.h"

namespace tessera::shm::testing {

using Bytes = std::vector<std::byte>;

/// What rank `rank` holds in the case of this number: all ranks can work it out.
inline Bytes drawn_bytes(int number, int rank, std::size_t count) {
  std::mt19937 draw(static_cast<unsigned>(number * 131 + rank + 1));
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(draw());
  return bytes;
}

inline std::vector<double> drawn_values(int number, int rank, std::size_t count) {
  std::mt19937 draw(static_cast<unsigned>(number * 131 + rank + 1));
  std::vector<double> values(count);
  for (auto& value : values) value = static_cast<double>(draw() % 2001) / 8 - 125;
  return values;
}

inline void expect_good(const std::vector<RankEnd>& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_TRUE(ends[r].ended) << "rank " << r;
    EXPECT_EQ(ends[r].exit_code, 0) << "rank " << r << ", signal " << ends[r].signal;
    EXPECT_EQ(ends[r].report, "") << "rank " << r;
  }
}

}  // namespace tessera::shm::testing
