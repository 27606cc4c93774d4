#include "tessera/nn/detail/flat_plan.h"

#include <algorithm>
#include <numeric>

namespace tessera::detail {

namespace {

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// The rows of each parameter between two cuts, which lie at rows or in padding.
void count_rows(const std::vector<FlatRows>& parameters, FlatPlan& plan) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto [rows, width] = parameters[i];
    std::vector<std::int64_t> kept;
    for (std::size_t r = 0; r + 1 < plan.cuts.size(); ++r) {
      const auto row = [&](std::int64_t cut) {
        return std::clamp<std::int64_t>((cut - plan.offset[i] + width - 1) / width, 0, rows);
      };
      kept.push_back(row(std::max(plan.cuts[r + 1], plan.offset[i])) -
                     row(std::max(plan.cuts[r], plan.offset[i])));
    }
    plan.rows.push_back(std::move(kept));
  }
}

// Intervals of `size`, a multiple of every width: a parameter that a cut goes through begins a
// whole number of rows before it. False if it takes more than `ranks` intervals.
bool place_evenly(const std::vector<FlatRows>& parameters, int ranks, std::int64_t size,
                  FlatPlan& plan) {
  plan = {};
  std::int64_t at = 0;
  for (const auto [rows, width] : parameters) {
    if ((at + rows * width - 1) / size != at / size) at = round_up(at, width);
    plan.offset.push_back(at);
    at += rows * width;
  }
  for (int r = 0; r <= ranks; ++r) plan.cuts.push_back(r * size);
  return at <= ranks * size;
}

void place_tightly(const std::vector<FlatRows>& parameters, int ranks, std::int64_t total,
                   FlatPlan& plan) {
  plan = {};
  std::int64_t at = 0;
  for (const auto [rows, width] : parameters) {
    plan.offset.push_back(at);
    at += rows * width;
  }
  plan.cuts.push_back(0);
  for (int r = 1; r < ranks; ++r) {
    // without a product of the two, which may not fit
    const std::int64_t even = total / ranks * r + total % ranks * r / ranks;
    std::size_t i = 0;
    while (i + 1 < parameters.size() && plan.offset[i + 1] <= even) ++i;
    const std::int64_t width = parameters[i].width;
    const std::int64_t row = (even - plan.offset[i] + width / 2) / width;
    plan.cuts.push_back(std::max(plan.cuts.back(), plan.offset[i] + row * width));
  }
  plan.cuts.push_back(total);
}

}  // namespace

std::vector<std::int64_t> FlatPlan::sizes() const {
  std::vector<std::int64_t> all;
  for (std::size_t r = 0; r + 1 < cuts.size(); ++r) all.push_back(cuts[r + 1] - cuts[r]);
  return all;
}

FlatPlan plan_flat(const std::vector<FlatRows>& parameters, int ranks) {
  std::int64_t total = 0, multiple = 1;
  for (const auto [rows, width] : parameters) total += rows * width;
  for (const auto [rows, width] : parameters) {
    multiple = std::lcm(multiple, width);
    if (multiple > total) break;
  }
  const std::int64_t most = total + std::max<std::int64_t>(total / 16, ranks);
  FlatPlan plan;
  bool even = false;
  for (std::int64_t size = round_up((total + ranks - 1) / ranks, multiple);
       multiple <= total && !even && size * ranks <= most; size += multiple)
    even = place_evenly(parameters, ranks, size, plan);
  if (!even) place_tightly(parameters, ranks, total, plan);
  count_rows(parameters, plan);
  return plan;
}

}  // namespace tessera::detail
