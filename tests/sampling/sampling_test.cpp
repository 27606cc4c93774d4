#include "tessera/sampling/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

TEST(WeightedDraws, FrequenciesFollowTheWeights) {
  Generator random(41);
  for (int n = 0; n < 20; ++n) {
    std::vector<double> weights(static_cast<std::size_t>(random.number(1, 20)));
    double sum = 0;
    for (double& w : weights) sum += w = static_cast<double>(random.number(0, 6));
    if (sum == 0) sum = weights[0] = 1;
    const WeightedDraws draws(weights, static_cast<std::uint64_t>(n));
    std::vector<double> count(weights.size(), 0);
    const int total = 40000;
    for (int k = 0; k < total; ++k) ++count[draws(static_cast<std::uint64_t>(k))];
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double p = weights[i] / sum;
      if (p == 0)
        EXPECT_EQ(count[i], 0);
      else
        EXPECT_NEAR(count[i], total * p, 6 * std::sqrt(total * p * (1 - p)) + 1e-9);
    }
  }
  EXPECT_THROW(WeightedDraws({0, 0}, 1), InvalidArgument);
  EXPECT_THROW(WeightedDraws({1, -1}, 1), InvalidArgument);
  EXPECT_THROW(WeightedDraws({}, 1), InvalidArgument);
}

TEST(WeightedDraws, ClassesAreBalanced) {
  const std::vector<std::int64_t> classes{7, 7, 7, 7, 7, 7, -2, -2, 3};
  const WeightedDraws draws(class_balanced_weights(classes), 5);
  std::map<std::int64_t, int> count;
  for (int k = 0; k < 30000; ++k) ++count[classes[draws(static_cast<std::uint64_t>(k))]];
  for (const auto& [c, n] : count) EXPECT_NEAR(n, 10000, 6 * std::sqrt(10000.0));
}

TEST(Mixture, KeepsToTheWeightsAndVisitsEverySample) {
  const Mixture m({{"a", 100}, {"b", 10}, {"c", 7}}, {{0, {0.6, 0.3, 0.1}}, {5000, {0, 1, 1}}}, 8);
  auto cursor = m.start();
  std::vector<std::vector<std::uint64_t>> of(3);
  for (int n = 1; n <= 5000; ++n) {
    const auto draw = m.next(cursor);
    of[draw.dataset].push_back(draw.sample);
    const double weights[] = {0.6, 0.3, 0.1};
    for (int d = 0; d < 3; ++d)
      EXPECT_LT(std::abs(static_cast<double>(of[d].size()) - n * weights[d]), 2.0);
  }
  for (int d = 0; d < 3; ++d) {
    const auto samples = m.datasets()[d].samples;
    for (std::size_t first = 0; first + samples <= of[d].size(); first += samples)
      EXPECT_EQ(
          std::set<std::uint64_t>(of[d].begin() + first, of[d].begin() + first + samples).size(),
          samples);
    EXPECT_NE(std::vector<std::uint64_t>(of[d].begin(), of[d].begin() + samples),
              std::vector<std::uint64_t>(of[d].begin() + samples, of[d].begin() + 2 * samples));
  }
  for (int n = 0; n < 1000; ++n) EXPECT_NE(m.next(cursor).dataset, 0);
}

TEST(Mixture, ASavedCursorGoesOnAsIfItHadNeverStopped) {
  const Mixture m({{"a", 9}, {"b", 4}}, {{0, {2, 1}}, {20, {1, 5}}}, 8);
  auto running = m.start();
  for (int stop = 0; stop < 60; ++stop) {
    auto resumed = running;
    auto reference = m.start();
    for (int n = 0; n < stop; ++n) m.next(reference);
    EXPECT_EQ(resumed, reference);
    EXPECT_EQ(m.next(running), m.next(resumed));
  }
  // Many draws at once are the same.
  for (std::size_t count : {0, 1, 7, 50}) {
    auto single = m.start(), together = single;
    std::vector<Mixture::Draw> draws(count);
    m.next(together, draws);
    for (const auto& draw : draws) EXPECT_EQ(m.next(single), draw);
    EXPECT_EQ(single, together);
  }
  EXPECT_NE(m.describe(), Mixture({{"a", 9}, {"b", 4}}, {{0, {2, 1}}, {20, {1, 4}}}, 8).describe());
  EXPECT_NE(m.describe(), Mixture({{"a", 9}, {"b", 4}}, {{0, {2, 1}}, {20, {1, 5}}}, 9).describe());
  Mixture::Cursor other;
  EXPECT_THROW(m.next(other), InvalidArgument);
}

TEST(Mixture, RefusesWhatCannotBe) {
  EXPECT_THROW(Mixture({}, {{0, {}}}, 1), InvalidArgument);
  EXPECT_THROW(Mixture({{"a", 3}}, {}, 1), InvalidArgument);
  EXPECT_THROW(Mixture({{"a", 3}}, {{1, {1}}}, 1), InvalidArgument);
  EXPECT_THROW(Mixture({{"a", 3}}, {{0, {1, 2}}}, 1), InvalidArgument);
  EXPECT_THROW(Mixture({{"a", 0}}, {{0, {1}}}, 1), InvalidArgument);
  EXPECT_NO_THROW(Mixture({{"a", 0}, {"b", 1}}, {{0, {0, 1}}}, 1));
}

TEST(Packing, BatchesHoldWhatFitsAndNothingIsLost) {
  Generator random(42);
  for (int n = 0; n < 2000; ++n) {
    std::vector<std::uint64_t> lengths(static_cast<std::size_t>(random.number(1, 40)));
    for (auto& l : lengths) l = static_cast<std::uint64_t>(random.number(0, 9));
    const LengthAt length = [&](std::uint64_t i) { return lengths[i]; };
    const TokenBudget budget{static_cast<std::uint64_t>(random.number(9, 30)),
                             random.chance(2) ? static_cast<std::uint64_t>(random.number(1, 5)) : 0,
                             random.chance(2)};
    auto cost = [&](std::uint64_t offset, std::uint64_t count) {
      std::uint64_t sum = 0, longest = 0;
      for (auto i = offset; i < offset + count; ++i)
        sum += lengths[i], longest = std::max(longest, lengths[i]);
      return budget.padded ? count * longest : sum;
    };
    for (std::uint64_t offset = 0; offset < lengths.size();) {
      const auto count = token_budget_batch(budget, offset, lengths.size(), length);
      ASSERT_GE(count, 1u);
      EXPECT_LE(cost(offset, count), budget.tokens);
      const bool more = offset + count < lengths.size() &&
                        (budget.max_samples == 0 || count < budget.max_samples);
      EXPECT_TRUE(!more || cost(offset, count + 1) > budget.tokens);
      offset += count;
    }
    const auto rows = static_cast<std::uint64_t>(random.number(1, 4)),
               capacity = static_cast<std::uint64_t>(random.number(9, 20));
    for (std::uint64_t offset = 0; offset < lengths.size();) {
      const auto packed = pack_batch(rows, capacity, offset, lengths.size(), length);
      ASSERT_EQ(packed.size(), rows);
      std::set<std::uint64_t> taken;
      for (const auto& row : packed) {
        std::uint64_t end = 0;
        for (const Packed& sample : row) {
          EXPECT_EQ(sample.begin, end);
          EXPECT_EQ(sample.length, lengths[sample.position]);
          end += sample.length;
          taken.insert(sample.position);
        }
        EXPECT_LE(end, capacity);
      }
      ASSERT_FALSE(taken.empty());
      EXPECT_EQ(*taken.begin(), offset);
      EXPECT_EQ(*taken.rbegin(), offset + taken.size() - 1);
      offset += taken.size();
    }
  }
  // Lengths whose sums and products do not fit in 64 bits.
  const LengthAt huge = [](std::uint64_t i) { return i < 8 ? 1 : (1ull << 63) + 5; };
  EXPECT_EQ(token_budget_batch({~0ull, 0, false}, 0, 20, huge), 9u);
  EXPECT_EQ(token_budget_batch({~0ull, 0, true}, 0, 20, huge), 8u);
  EXPECT_EQ(pack_batch(2, ~0ull, 0, 20, huge)[1].size(), 1u);
  const LengthAt ten = [](std::uint64_t) { return 10; };
  EXPECT_THROW(token_budget_batch({9}, 0, 1, ten), InvalidArgument);
  EXPECT_THROW(token_budget_batch({0}, 0, 1, ten), InvalidArgument);
  EXPECT_THROW(pack_batch(1, 9, 0, 1, ten), InvalidArgument);
}

}  // namespace
}  // namespace tessera
