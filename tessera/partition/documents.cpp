#include "tessera/partition/documents.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/partition/partition.h"

namespace tessera {

namespace {

// Costs of the first i tokens of all rows.
std::vector<double> costs_of(const DocumentLengths& rows, std::int64_t tokens,
                             const DocumentCutOptions& options) {
  std::vector<double> sum(static_cast<std::size_t>(tokens) + 1, 0.0);
  for (const auto& lengths : rows) {
    const auto bounds = document_bounds(lengths, tokens);
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      for (std::int64_t i = 0; i < lengths[d]; ++i)
        sum[bounds[d] + i + 1] += static_cast<double>(options.causal ? i + 1 : lengths[d]);
    }
  }
  const double besides = options.token_cost * static_cast<double>(rows.size());
  for (std::int64_t i = 0; i < tokens; ++i) sum[i + 1] += sum[i] + besides;
  return sum;
}

// Sizes of parts that cost at most `limit` and have at most `most` tokens, the earlier ones as
// large as they can be; what does not fit is the last one's too.
std::vector<std::int64_t> filled(const std::vector<double>& sum, int parts, double limit,
                                 std::int64_t most) {
  std::vector<std::int64_t> sizes;
  const auto tokens = static_cast<std::int64_t>(sum.size()) - 1;
  std::int64_t begin = 0;
  for (int p = 0; p + 1 < parts; ++p) {
    const auto last = sum.begin() + begin + std::min(most, tokens - begin) + 1;
    const std::int64_t end =
        std::upper_bound(sum.begin() + begin, last, sum[begin] + limit) - sum.begin() - 1;
    sizes.push_back(end - begin);
    begin = end;
  }
  sizes.push_back(tokens - begin);
  return sizes;
}

double dearest(const std::vector<double>& sum, const std::vector<std::int64_t>& sizes) {
  double most = 0;
  std::int64_t begin = 0;
  for (const std::int64_t n : sizes) {
    most = std::max(most, sum[begin + n] - sum[begin]);
    begin += n;
  }
  return most;
}

}  // namespace

std::vector<std::int64_t> document_bounds(std::span<const std::int64_t> lengths,
                                          std::int64_t tokens) {
  std::vector<std::int64_t> bounds{0};
  for (const std::int64_t n : lengths) {
    if (n < 0) throw InvalidArgument("a document of ", n, " tokens; give 0 or more");
    if (n > tokens - bounds.back())
      throw InvalidArgument("documents of lengths ",
                            list(std::vector<std::int64_t>(lengths.begin(), lengths.end())),
                            " are longer than the row of ", tokens, " tokens that holds them");
    bounds.push_back(bounds.back() + n);
  }
  return bounds;
}

DocumentCut cut_documents(const DocumentLengths& rows, int parts,
                          const DocumentCutOptions& options) {
  if (parts < 1 || rows.empty())
    throw InvalidArgument("cut_documents of ", rows.size(), " rows into ", parts,
                          " parts; give 1 or more");
  if (!std::isfinite(options.token_cost) || options.token_cost < 0 || options.tokens < 0 ||
      options.most_tokens < 0)
    throw InvalidArgument("cut_documents with a token cost of ", options.token_cost, ", ",
                          options.tokens, " tokens, at most ", options.most_tokens,
                          "; give 0 or more");
  std::int64_t tokens = options.tokens;
  if (tokens == 0) {
    for (const auto& lengths : rows)
      tokens = std::max(tokens, document_bounds(lengths, std::int64_t{1} << 62).back());
  }
  const std::int64_t most = options.most_tokens > 0 ? options.most_tokens : tokens;
  if (most < ceil_div(tokens, parts))
    throw InvalidArgument(parts, " parts of at most ", most, " tokens do not hold a row of ",
                          tokens, "; allow ", ceil_div(tokens, parts));
  const std::vector<double> sum = costs_of(rows, tokens, options);
  if (!std::isfinite(sum.back()))
    throw InvalidArgument("cut_documents with a token cost of ", options.token_cost,
                          ": the cost of all ", tokens, " tokens is no finite number");
  const auto fits = [&](const std::vector<std::int64_t>& sizes, double limit) {
    return sizes.back() <= most && dearest(sum, sizes) <= limit;
  };
  // Of all limits that can be kept the lowest, by bisection.
  const std::vector<std::int64_t> even = Partition::even(tokens, parts).sizes();
  double low = sum.back() / parts, high = dearest(sum, even);
  DocumentCut cut{even, 1, 1};
  while (high > low) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) break;
    const auto sizes = filled(sum, parts, middle, most);
    if (fits(sizes, middle)) {
      cut.sizes = sizes;
      high = dearest(sum, sizes);
    } else {
      low = middle;
    }
  }
  if (sum.back() > 0) {
    cut.imbalance = dearest(sum, cut.sizes) * parts / sum.back();
    cut.imbalance_of_even = dearest(sum, even) * parts / sum.back();
  }
  return cut;
}

}  // namespace tessera
