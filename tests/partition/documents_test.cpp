// Cuts of packed rows by cost: the best there is, over drawn lengths, and better than equally many
// tokens.

#include "tessera/partition/documents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/partition/partition.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;

// Cost of each token, pair by pair.
std::vector<double> costs_of(const DocumentLengths& rows, std::int64_t tokens,
                             const DocumentCutOptions& options) {
  std::vector<double> all(static_cast<std::size_t>(tokens),
                          options.token_cost * static_cast<double>(rows.size()));
  for (const Sizes& lengths : rows) {
    std::int64_t begin = 0;
    for (const std::int64_t n : lengths) {
      for (std::int64_t q = begin; q < begin + n; ++q) {
        for (std::int64_t k = begin; k < begin + n; ++k) all[q] += !options.causal || k <= q;
      }
      begin += n;
    }
  }
  return all;
}

double dearest(const std::vector<double>& costs, const Sizes& sizes) {
  double most = 0;
  std::int64_t begin = 0;
  for (const std::int64_t n : sizes) {
    most = std::max(most, std::accumulate(costs.begin() + begin, costs.begin() + begin + n, 0.0));
    begin += n;
  }
  return most;
}

// The dearest part of the best cut, by trying all.
double best(const std::vector<double>& costs, std::int64_t begin, int parts, std::int64_t most) {
  const auto tokens = static_cast<std::int64_t>(costs.size());
  if (parts == 1)
    return tokens - begin > most ? std::numeric_limits<double>::infinity()
                                 : std::accumulate(costs.begin() + begin, costs.end(), 0.0);
  double found = std::numeric_limits<double>::infinity(), own = 0;
  for (std::int64_t end = begin; end <= std::min(tokens, begin + most); ++end) {
    found = std::min(found, std::max(own, best(costs, end, parts - 1, most)));
    if (end < tokens) own += costs[end];
  }
  return found;
}

struct Drawn {
  std::mt19937_64 engine;
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(high - low + 1));
  }
};

TEST(DocumentCuts, AreTheBestThereAre) {
  Drawn draw{std::mt19937_64(5)};
  for (int i = 0; i < 400; ++i) {
    DocumentCutOptions options{.causal = i % 2 == 0,
                               .token_cost = i % 3 == 0 ? 0.0 : 1.7 * draw.between(0, 5)};
    DocumentLengths rows(draw.between(1, 3));
    std::int64_t tokens = 0;
    for (Sizes& lengths : rows) {
      for (auto n = draw.between(0, 4); n > 0; --n) lengths.push_back(draw.between(0, 4));
      tokens = std::max(tokens, std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
    }
    if (i % 5 == 0) options.tokens = tokens += draw.between(0, 3);
    const int parts = static_cast<int>(draw.between(1, 4));
    if (i % 4 == 0) options.most_tokens = draw.between(ceil_div(tokens, parts), tokens + 1);
    const auto cut = cut_documents(rows, parts, options);
    const std::string where = concat(i, ": ", list(cut.sizes), " at most ", options.most_tokens);
    ASSERT_EQ(cut.sizes.size(), static_cast<std::size_t>(parts)) << where;
    ASSERT_EQ(std::accumulate(cut.sizes.begin(), cut.sizes.end(), std::int64_t{0}), tokens);
    const auto most = options.most_tokens > 0 ? options.most_tokens : tokens;
    ASSERT_LE(*std::ranges::max_element(cut.sizes), most) << where;
    ASSERT_GE(*std::ranges::min_element(cut.sizes), 0) << where;
    const auto costs = costs_of(rows, tokens, options);
    const double all = std::accumulate(costs.begin(), costs.end(), 0.0);
    ASSERT_NEAR(dearest(costs, cut.sizes), best(costs, 0, parts, most), 1e-9 * (1 + all)) << where;
    const auto ratio = [&](const Sizes& sizes) {
      return all > 0 ? dearest(costs, sizes) * parts / all : 1;
    };
    ASSERT_NEAR(cut.imbalance, ratio(cut.sizes), 1e-9) << where;
    ASSERT_NEAR(cut.imbalance_of_even, ratio(Partition::even(tokens, parts).sizes()), 1e-9);
  }
}

// Lengths of a heavy tail, as of documents of the web, on 2 to 64 ranks.
TEST(DocumentCuts, AreBetterThanEquallyManyTokens) {
  Drawn draw{std::mt19937_64(6)};
  double even = 0, cost = 0;
  int cases = 0;
  for (const int parts : {2, 8, 64}) {
    for (const bool causal : {false, true}) {
      for (int i = 0; i < 10; ++i, ++cases) {
        Sizes lengths;
        std::int64_t tokens = 0;
        while (tokens < 131072) {
          const double u = static_cast<double>(draw.between(1, 1000)) / 1000;
          lengths.push_back(static_cast<std::int64_t>(64 * std::pow(u, -1.2)));
          tokens += lengths.back();
        }
        const auto cut = cut_documents({lengths}, parts, {.causal = causal, .token_cost = 64});
        EXPECT_LE(cut.imbalance, cut.imbalance_of_even);
        EXPECT_LT(cut.imbalance, 1.05) << parts << " parts";
        even += cut.imbalance_of_even;
        cost += cut.imbalance;
      }
    }
  }
  EXPECT_LT(cost / cases, 1.02);
  EXPECT_GT(even / cases, 2);
}

TEST(DocumentCuts, OfNothingAndRefused) {
  EXPECT_EQ(cut_documents({{}}, 3).sizes, (Sizes{0, 0, 0}));
  EXPECT_EQ(cut_documents({{}}, 2, {.tokens = 4}).sizes, (Sizes{2, 2}));
  EXPECT_EQ(cut_documents({{2, 6}}, 2, {.causal = true}).sizes, (Sizes{6, 2}));
  EXPECT_EQ(document_bounds(Sizes{3, 0, 2}, 6), (Sizes{0, 3, 3, 5}));
  EXPECT_THROW(cut_documents({{3}}, 0), InvalidArgument);
  EXPECT_THROW(cut_documents({}, 2), InvalidArgument);
  EXPECT_THROW(cut_documents({{3, -1}}, 2), InvalidArgument);
  EXPECT_THROW(cut_documents({{5}}, 2, {.tokens = 4}), InvalidArgument);
  EXPECT_THROW(cut_documents({{5}}, 2, {.tokens = -4}), InvalidArgument);
  EXPECT_THROW(cut_documents({{5}}, 2, {.most_tokens = 2}), InvalidArgument);
  EXPECT_THROW(cut_documents({{5}}, 2, {.token_cost = std::nan("")}), InvalidArgument);
  EXPECT_THROW(cut_documents({Sizes(4096, 1)}, 2, {.token_cost = 1e306}), InvalidArgument);
  EXPECT_THROW(cut_documents({{std::numeric_limits<std::int64_t>::max(), 1}}, 2), InvalidArgument);
}

}  // namespace
}  // namespace tessera
