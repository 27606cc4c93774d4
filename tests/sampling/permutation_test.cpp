#include "tessera/sampling/permutation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

// Probability bound: a chi-square value with k degrees of freedom lies above k + 6 * sqrt(2k) less
// than once in a million (normal approximation, one side).
void expect_uniform(const std::vector<double>& observed, double expected) {
  double chi2 = 0;
  for (double o : observed) chi2 += (o - expected) * (o - expected) / expected;
  const double k = static_cast<double>(observed.size()) - 1;
  EXPECT_LT(chi2, k + 6 * std::sqrt(2 * k));
}

TEST(KeyedPermutation, IsABijectionWithItsInverse) {
  Generator random(11);
  for (std::uint64_t size = 1; size <= 600; ++size) {
    const KeyedPermutation p(size, 7, size);
    std::vector<bool> hit(size, false);
    for (std::uint64_t i = 0; i < size; ++i) {
      const auto j = p(i);
      ASSERT_LT(j, size);
      ASSERT_FALSE(hit[j]);
      hit[j] = true;
      ASSERT_EQ(p.inverse(j), i);
    }
    // Any part at once is the same.
    const auto first =
        static_cast<std::uint64_t>(random.number(0, static_cast<std::int64_t>(size - 1)));
    std::vector<std::uint64_t> part(
        static_cast<std::size_t>(random.number(0, static_cast<std::int64_t>(size - first))));
    p.fill(first, part);
    for (std::size_t k = 0; k < part.size(); ++k) ASSERT_EQ(part[k], p(first + k));
    std::vector<std::uint64_t> beyond(size - first + 1);
    EXPECT_THROW(p.fill(first, beyond), InvalidArgument);
  }
  for (const std::uint64_t size :
       {(1ull << 63), (1ull << 63) - 25, (1ull << 40) + 1, (1ull << 32), 1'000'003ull}) {
    const KeyedPermutation p(size, 3, 9);
    for (int n = 0; n < 2000; ++n) {
      const auto i =
          static_cast<std::uint64_t>(random.number(0, static_cast<std::int64_t>(size - 1)));
      ASSERT_LT(p(i), size);
      ASSERT_EQ(p.inverse(p(i)), i);
    }
  }
  EXPECT_THROW(KeyedPermutation((1ull << 63) + 1, 0), InvalidArgument);
}

TEST(KeyedPermutation, GivesTheSameNumbersOnEveryPlatform) {
  std::vector<std::uint64_t> first;
  const KeyedPermutation small(10, 42, 0), large(1ull << 63, 42, 1);
  for (std::uint64_t i = 0; i < 10; ++i) first.push_back(small(i));
  // Recorded once: a change of these numbers changes the data order of every run, and is a breaking
  // change.
  EXPECT_EQ(first, (std::vector<std::uint64_t>{6, 4, 7, 5, 2, 8, 0, 1, 3, 9}));
  EXPECT_EQ(large(0), 1104342360850349357ull);
  EXPECT_EQ(large(1), 1856824490397589143ull);
  EXPECT_EQ(keyed_random(1, 2, 3), 7702586659592502839ull);
}

TEST(KeyedPermutation, EveryPositionAndPairIsEquallyLikelyOverSeeds) {
  for (const std::uint64_t size : {3ull, 7ull, 10ull, 33ull}) {
    std::vector<double> position(size * size, 0), pair(size * size, 0);
    const int seeds = 20000;
    for (int seed = 0; seed < seeds; ++seed) {
      const KeyedPermutation p(size, static_cast<std::uint64_t>(seed));
      for (std::uint64_t i = 0; i < size; ++i) ++position[i * size + p(i)];
      ++pair[p(0) * size + p(1)];
    }
    for (std::uint64_t i = 0; i < size; ++i)
      expect_uniform(
          std::vector<double>(position.begin() + i * size, position.begin() + (i + 1) * size),
          static_cast<double>(seeds) / size);
    std::vector<double> off_diagonal;
    for (std::uint64_t a = 0; a < size; ++a)
      for (std::uint64_t b = 0; b < size; ++b)
        if (a != b) off_diagonal.push_back(pair[a * size + b]);
    expect_uniform(off_diagonal, static_cast<double>(seeds) / off_diagonal.size());
  }
}

TEST(KeyedPermutation, AllOrdersOfFourAreReached) {
  std::map<std::vector<std::uint64_t>, double> count;
  const int seeds = 24000;
  for (int seed = 0; seed < seeds; ++seed) {
    const KeyedPermutation p(4, static_cast<std::uint64_t>(seed));
    ++count[{p(0), p(1), p(2), p(3)}];
  }
  EXPECT_EQ(count.size(), 24u);
  std::vector<double> observed;
  for (const auto& [order, n] : count) observed.push_back(n);
  expect_uniform(observed, seeds / 24.0);
}

TEST(KeyedPermutation, EveryBitOfIndexAndSeedChangesHalfOfTheResult) {
  const int bits = 40;
  const std::uint64_t size = 1ull << bits;
  Generator random(12);
  for (int flipped = 0; flipped < bits; ++flipped) {
    double by_index = 0, by_seed = 0, by_stream = 0;
    const int trials = 400;
    for (int t = 0; t < trials; ++t) {
      const auto i =
          static_cast<std::uint64_t>(random.number(0, static_cast<std::int64_t>(size - 1)));
      const auto seed = static_cast<std::uint64_t>(random.number(0, 1ll << 62));
      const KeyedPermutation p(size, seed, 5);
      by_index += std::popcount(p(i) ^ p(i ^ (1ull << flipped)));
      by_seed += std::popcount(p(i) ^ KeyedPermutation(size, seed ^ (1ull << flipped), 5)(i));
      by_stream += std::popcount(p(i) ^ KeyedPermutation(size, seed, 5 ^ (1ull << flipped))(i));
    }
    // The mean of `trials` binomials(40, 1/2): standard deviation sqrt(10 / trials) = 0.16.
    EXPECT_NEAR(by_index / trials, bits / 2.0, 1.0) << "bit " << flipped;
    EXPECT_NEAR(by_seed / trials, bits / 2.0, 1.0) << "bit " << flipped;
    EXPECT_NEAR(by_stream / trials, bits / 2.0, 1.0) << "bit " << flipped;
  }
}

TEST(KeyedPermutation, BatchesMixEvenAndOddAndAllRegions) {
  for (const std::uint64_t size : {1000ull, 65536ull, 100'000ull, 1'000'000ull, (1ull << 40)}) {
    const KeyedPermutation p(size, 99, 0);
    const int batches = static_cast<int>(std::min<std::uint64_t>(200, size / 256));
    for (int b = 0; b < batches; ++b) {
      int odd = 0;
      for (int i = 0; i < 256; ++i)
        odd += static_cast<int>(p(static_cast<std::uint64_t>(256 * b + i)) & 1);
      EXPECT_NEAR(odd, 128, 6 * 8);  // standard deviation 8 at most
    }
    std::vector<double> region(64, 0), residue(61, 0), step_parity(2, 0);
    const std::uint64_t drawn = std::min<std::uint64_t>(size / 2, 50000);
    for (std::uint64_t i = 0; i < drawn; ++i) {
      ++region[static_cast<std::size_t>(static_cast<long double>(p(i)) * 64 / size)];
      ++residue[p(i) % 61];
      ++step_parity[(p(i) ^ p(i + 1)) & 1];
    }
    expect_uniform(step_parity, static_cast<double>(drawn) / 2);
    if (size >= 65536) {
      expect_uniform(region, static_cast<double>(drawn) / 64);
      expect_uniform(residue, static_cast<double>(drawn) / 61);
    }
  }
}

}  // namespace
}  // namespace tessera
