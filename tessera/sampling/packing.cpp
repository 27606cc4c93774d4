#include "tessera/sampling/packing.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

std::uint64_t token_budget_batch(const TokenBudget& budget, std::uint64_t offset, std::uint64_t end,
                                 const LengthAt& length) {
  if (budget.tokens == 0)
    throw InvalidArgument("a token budget of 0; give at least the length of the longest sample");
  std::uint64_t count = 0, sum = 0, longest = 0;
  for (; offset + count < end && (budget.max_samples == 0 || count < budget.max_samples); ++count) {
    const std::uint64_t n = length(offset + count);
    if (n > budget.tokens)
      throw InvalidArgument(concat("the sample at position ", offset + count, " has ", n,
                                   " tokens, the budget of a batch is ", budget.tokens,
                                   "; shorten the sample, leave it out, or raise the budget"));
    // By division and difference, so that nothing can overflow.
    longest = std::max(longest, n);
    if (budget.padded ? longest > budget.tokens / (count + 1) : n > budget.tokens - sum) break;
    sum += budget.padded ? 0 : n;
  }
  return count;
}

std::vector<std::vector<Packed>> pack_batch(std::uint64_t rows, std::uint64_t capacity,
                                            std::uint64_t offset, std::uint64_t end,
                                            const LengthAt& length) {
  if (rows == 0 || capacity == 0)
    throw InvalidArgument(concat("a packed batch of ", rows, " rows of ", capacity,
                                 " tokens; give at least 1 of each"));
  std::vector<std::vector<Packed>> packed(rows);
  std::vector<std::uint64_t> used(rows, 0);
  for (; offset < end; ++offset) {
    const std::uint64_t n = length(offset);
    if (n > capacity)
      throw InvalidArgument(concat("the sample at position ", offset, " has ", n,
                                   " tokens, a row holds ", capacity,
                                   "; split the sample, leave it out, or use longer rows"));
    const auto row =
        std::find_if(used.begin(), used.end(), [&](std::uint64_t u) { return n <= capacity - u; });
    if (row == used.end()) break;
    packed[row - used.begin()].push_back({offset, *row, n});
    *row += n;
  }
  return packed;
}

}  // namespace tessera
