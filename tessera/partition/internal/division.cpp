#include "tessera/partition/internal/division.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

namespace tessera::detail {
namespace {

constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();

// Whole numbers in the order of the coordinates; -0 is 0.
std::int64_t ordered(double x) {
  const auto bits = std::bit_cast<std::int64_t>(x + 0.0);
  return bits >= 0 ? bits : bits ^ std::numeric_limits<std::int64_t>::max();
}
double coordinate_of(std::int64_t order) {
  return std::bit_cast<double>(order >= 0 ? order
                                          : order ^ std::numeric_limits<std::int64_t>::max());
}

void over_ranks(const std::function<void(std::span<std::int64_t>)>& reduce,
                std::vector<std::int64_t>& numbers) {
  if (reduce) reduce(numbers);
}

std::int64_t count_of(const PointsHere& points) {
  return static_cast<std::int64_t>(points.coordinates.size()) / points.dims;
}

struct Row {
  std::size_t group = 0, point = 0;
  std::uint64_t key = 0;
  std::int64_t number = 0, cost = 0;
  auto place() const { return std::tuple(group, key, number); }
};

// Where the rows of a group, in the order of their keys and numbers, have cost `target`.
struct Cut {
  std::size_t group = 0;
  std::int64_t target = 0;
  std::uint64_t key = 0;
  std::int64_t number = 0, before = 0;

  bool is_before(const Row& row) const {
    if (key == row.key && number == row.number) return 2 * before + row.cost >= 2 * target;
    return std::tie(key, number) < std::tie(row.key, row.number);
  }
};

// The cost of `some` of `parts` equal parts of all, rounded up.
std::int64_t share_of(std::int64_t all, int some, int parts) {
  return all / parts * some + (all % parts * some + parts - 1) / parts;
}

class Division {
 public:
  Division(const PointsHere& points, std::span<const std::int64_t> costs, const SharedSums& over)
      : points_(points), over_(over), rows_(static_cast<std::size_t>(count_of(points))) {
    for (std::size_t i = 0; i < rows_.size(); ++i)
      rows_[i] = {0, i, 0, points.first + static_cast<std::int64_t>(i), costs[i]};
    std::vector<std::int64_t> last{rows_.empty() ? 0 : rows_.back().number};
    over_ranks(over.max, last);
    number_bits_ = std::bit_width(static_cast<std::uint64_t>(last[0]));
  }
  std::vector<Row>& rows() { return rows_; }
  double at(const Row& row, std::size_t dim) const {
    return points_.coordinates[row.point * dims() + dim];
  }
  std::size_t dims() const { return static_cast<std::size_t>(points_.dims); }

  // The lowest coordinates of each group, dim by dim, and behind these the highest.
  std::vector<double> boxes(std::size_t groups) const {
    const std::size_t n = groups * dims();
    std::vector<std::int64_t> most(2 * n, kLeast);
    for (const Row& row : rows_) {
      for (std::size_t d = 0; d < dims(); ++d) {
        const std::int64_t x = ordered(at(row, d));
        std::int64_t &low = most[row.group * dims() + d], &high = most[n + row.group * dims() + d];
        low = std::max(low, ~x);
        high = std::max(high, x);
      }
    }
    over_ranks(over_.max, most);
    std::vector<double> box(2 * n, 0);
    for (std::size_t i = 0; i < n; ++i) {
      if (most[i] == kLeast) continue;  // a group without rows
      box[i] = coordinate_of(~most[i]);
      box[n + i] = coordinate_of(most[n + i]);
    }
    return box;
  }
  std::vector<std::int64_t> costs(std::size_t groups) const {
    std::vector<std::int64_t> all(groups, 0);
    for (const Row& row : rows_) all[row.group] += row.cost;
    over_ranks(over_.sum, all);
    return all;
  }
  // Bit by bit the last place before which there is less than the target. Sorts the rows.
  void find(std::vector<Cut>& cuts) {
    std::ranges::sort(rows_, {}, &Row::place);
    std::vector<std::int64_t> until(rows_.size() + 1, 0), before(cuts.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) until[i + 1] = until[i] + rows_[i].cost;
    const auto until_place = [&](std::size_t group, std::uint64_t key, std::int64_t number) {
      const auto at =
          std::ranges::lower_bound(rows_, std::tuple(group, key, number), {}, &Row::place);
      return until[at - rows_.begin()];
    };
    for (int bit = 63 + number_bits_; bit >= 0; --bit) {
      const auto further = [&](Cut cut) {
        if (bit >= number_bits_)
          cut.key |= std::uint64_t{1} << (bit - number_bits_);
        else
          cut.number |= std::int64_t{1} << bit;
        return cut;
      };
      for (std::size_t c = 0; c < cuts.size(); ++c) {
        const Cut probe = further(cuts[c]);
        before[c] =
            until_place(probe.group, probe.key, probe.number) - until_place(probe.group, 0, 0);
      }
      over_ranks(over_.sum, before);
      for (std::size_t c = 0; c < cuts.size(); ++c) {
        if (before[c] >= cuts[c].target) continue;
        cuts[c] = further(cuts[c]);
        cuts[c].before = before[c];
      }
    }
  }

 private:
  const PointsHere& points_;
  const SharedSums& over_;
  std::vector<Row> rows_;
  int number_bits_ = 0;
};

// Parts that are still together: the first of them, and how many they are.
struct Parts {
  int first, count;
};

// Each group in two, across the dim in which it extends farthest.
void halve(Division& all, std::vector<Parts>& groups) {
  const std::size_t dims = all.dims(), n = groups.size() * dims;
  const auto box = all.boxes(groups.size());
  const auto costs = all.costs(groups.size());
  std::vector<std::size_t> widest(groups.size(), 0);
  std::vector<Cut> cuts;
  std::vector<std::int64_t> cut_of(groups.size(), -1);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto extent = [&](std::size_t d) { return box[n + g * dims + d] - box[g * dims + d]; };
    for (std::size_t d = 1; d < dims; ++d)
      if (extent(d) > extent(widest[g])) widest[g] = d;
    if (groups[g].count == 1) continue;
    cut_of[g] = static_cast<std::int64_t>(cuts.size());
    cuts.push_back({g, share_of(costs[g], groups[g].count / 2, groups[g].count)});
  }
  for (Row& row : all.rows())
    row.key = static_cast<std::uint64_t>(ordered(all.at(row, widest[row.group]))) ^
              (std::uint64_t{1} << 63);
  all.find(cuts);
  std::vector<std::size_t> second(groups.size(), 0);
  for (const Cut& cut : cuts) {
    const auto [first, count] = groups[cut.group];
    second[cut.group] = groups.size();
    groups[cut.group].count = count / 2;
    groups.push_back({first + count / 2, count - count / 2});
  }
  for (Row& row : all.rows())
    if (const auto c = cut_of[row.group]; c >= 0 && cuts[c].is_before(row))
      row.group = second[row.group];
}

}  // namespace

std::vector<std::int64_t> whole_costs(const PointsHere& points, const SharedSums& over) {
  std::vector<std::int64_t> all{count_of(points)};
  if (!points.weighted) return std::vector<std::int64_t>(static_cast<std::size_t>(all[0]), 1);
  over_ranks(over.sum, all);
  std::vector<std::int64_t> most{0};
  for (const double w : points.weights) most[0] = std::max(most[0], ordered(w));
  over_ranks(over.max, most);
  std::vector<std::int64_t> costs(points.weights.size(), 0);
  if (most[0] == 0) return costs;
  const int scale =
      60 - std::ilogb(coordinate_of(most[0])) - std::bit_width(static_cast<std::uint64_t>(all[0]));
  for (std::size_t i = 0; i < costs.size(); ++i)
    costs[i] = static_cast<std::int64_t>(std::ldexp(points.weights[i], scale));
  return costs;
}

std::vector<int> bisected(const PointsHere& points, std::span<const std::int64_t> costs, int parts,
                          const SharedSums& over) {
  Division all(points, costs, over);
  std::vector<Parts> groups{{0, parts}};
  while (std::ranges::any_of(groups, [](const Parts& g) { return g.count > 1; }))
    halve(all, groups);
  std::vector<int> part(costs.size(), 0);
  for (const Row& row : all.rows()) part[row.point] = groups[row.group].first;
  return part;
}

std::vector<int> along_curve(const PointsHere& points, std::span<const std::int64_t> costs,
                             int parts, const SharedSums& over) {
  Division all(points, costs, over);
  const auto box = all.boxes(1);
  double extent = 0;
  for (std::size_t d = 0; d < all.dims(); ++d)
    extent = std::max(extent, box[all.dims() + d] - box[d]);
  const auto positions =
      curve_positions(points.coordinates, points.dims, std::span(box).first(all.dims()), extent);
  for (Row& row : all.rows()) row.key = positions[row.point];
  const std::int64_t cost = all.costs(1)[0];
  std::vector<Cut> cuts;
  for (int p = 1; p < parts; ++p) cuts.push_back({0, share_of(cost, p, parts)});
  all.find(cuts);
  std::vector<int> part(costs.size(), 0);
  std::size_t passed = 0;
  for (const Row& row : all.rows()) {
    while (passed < cuts.size() && cuts[passed].is_before(row)) ++passed;
    part[row.point] = static_cast<int>(passed);
  }
  return part;
}

}  // namespace tessera::detail
