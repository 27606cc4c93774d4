#include "tessera/partition/neighbors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr int kMostDims = 8;

struct Pair {
  double distance;
  std::int64_t point;
  std::array<int, kMostDims> image;
};

// Points by the cell that they lie in. Periodic dims have the period's extent.
class CellGrid {
 public:
  // Cells are at least `least` wide, and about as many as points.
  CellGrid(std::span<const double> points, int dims, std::span<const double> box, double least)
      : points_(points), dims_(dims), count_(static_cast<std::int64_t>(points.size()) / dims) {
    const double per_dim =
        std::max(1.0, std::floor(std::pow(static_cast<double>(count_), 1.0 / dims)));
    std::int64_t cells = 1;
    for (int d = 0; d < dims; ++d) {
      period_[d] = box.empty() ? 0 : box[d];
      double high = period_[d];
      low_[d] = 0;
      if (period_[d] == 0) {
        low_[d] = count_ > 0 ? std::numeric_limits<double>::infinity() : 0;
        high = -low_[d];
        for (std::int64_t i = 0; i < count_; ++i) {
          low_[d] = std::min(low_[d], at(i, d));
          high = std::max(high, at(i, d));
        }
      }
      extent_[d] = std::max(0.0, high - low_[d]);
      const double fit = least > 0 ? std::floor(extent_[d] / least) : per_dim;
      cells_[d] = static_cast<std::int64_t>(std::clamp(fit, 1.0, per_dim));
      width_[d] = extent_[d] > 0 ? extent_[d] / static_cast<double>(cells_[d]) : 1;
      cells *= cells_[d];
    }
    fill(cells);
  }

  // Calls visit(pair) for each image of a point at most `radius` away from `query`.
  template <class Visit>
  void within(const double* query, double radius, const Visit& visit) const {
    if (count_ == 0) return;
    std::array<std::int64_t, kMostDims> first{}, last{}, cell{};
    std::array<double, kMostDims> moved{};
    for (int d = 0; d < dims_; ++d) {
      const double q = wrapped(query[d], d, moved[d]) - low_[d];
      const double reach = radius + 1e-9 * (radius + extent_[d] + std::abs(query[d]));
      const double from = std::floor((q - reach) / width_[d]);
      const double to = std::floor((q + reach) / width_[d]);
      const double most = static_cast<double>(cells_[d]) - 1;
      first[d] = static_cast<std::int64_t>(period_[d] > 0 ? from : std::clamp(from, 0.0, most));
      last[d] = static_cast<std::int64_t>(period_[d] > 0 ? to : std::clamp(to, 0.0, most));
    }
    cell = first;
    for (;;) {
      visit_cell(query, radius, cell, moved, visit);
      int d = dims_ - 1;
      while (d >= 0 && ++cell[d] > last[d]) {
        cell[d] = first[d];
        --d;
      }
      if (d < 0) return;
    }
  }
  // No point, or the nearest image of one, is farther.
  double farthest(const double* query) const {
    double sum = 0;
    for (int d = 0; d < dims_; ++d) {
      const double far = period_[d] > 0 ? period_[d] / 2
                                        : std::max(std::abs(query[d] - low_[d]),
                                                   std::abs(low_[d] + extent_[d] - query[d]));
      sum += far * far;
    }
    return std::sqrt(sum) * (1 + 1e-9);
  }
  double width() const { return *std::min_element(width_.begin(), width_.begin() + dims_); }
  std::int64_t count() const { return count_; }

 private:
  double at(std::int64_t point, int d) const { return points_[point * dims_ + d]; }
  // A coordinate in [0, period), and how many periods it was away.
  double wrapped(double x, int d, double& periods) const {
    periods = 0;
    if (period_[d] == 0) return x;
    periods = std::floor(x / period_[d]);
    return std::clamp(x - periods * period_[d], 0.0, period_[d]);
  }
  std::int64_t cell_of(std::int64_t point) const {
    std::int64_t index = 0;
    double periods = 0;
    for (int d = 0; d < dims_; ++d) {
      const double x = (wrapped(at(point, d), d, periods) - low_[d]) / width_[d];
      const auto c = static_cast<std::int64_t>(std::floor(x));
      index = index * cells_[d] + std::clamp<std::int64_t>(c, 0, cells_[d] - 1);
    }
    return index;
  }
  void fill(std::int64_t cells) {
    begin_.assign(cells + 1, 0);
    std::vector<std::int64_t> of(static_cast<std::size_t>(count_));
    for (std::int64_t i = 0; i < count_; ++i) {
      of[i] = cell_of(i);
      ++begin_[of[i] + 1];
    }
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    order_.resize(count_);
    auto next = begin_;
    for (std::int64_t i = 0; i < count_; ++i) order_[next[of[i]]++] = i;
  }
  // `cell` may lie in an image of the grid; `moved`: the periods that the query was away.
  template <class Visit>
  void visit_cell(const double* query, double radius,
                  const std::array<std::int64_t, kMostDims>& cell,
                  const std::array<double, kMostDims>& moved, const Visit& visit) const {
    std::int64_t index = 0;
    std::array<std::int64_t, kMostDims> image{};
    for (int d = 0; d < dims_; ++d) {
      const std::int64_t n = cells_[d];
      image[d] = cell[d] >= 0 ? cell[d] / n : -((n - 1 - cell[d]) / n);
      index = index * n + cell[d] - image[d] * n;
    }
    for (std::int64_t k = begin_[index]; k < begin_[index + 1]; ++k) {
      Pair pair{0, order_[k], {}};
      for (int d = 0; d < dims_; ++d) {
        const double x = at(pair.point, d);
        double periods = 0;
        wrapped(x, d, periods);
        pair.image[d] = static_cast<int>(static_cast<double>(image[d]) + moved[d] - periods);
        const double apart = x + pair.image[d] * period_[d] - query[d];
        pair.distance += apart * apart;
      }
      pair.distance = std::sqrt(pair.distance);
      if (pair.distance <= radius) visit(pair);
    }
  }

  std::span<const double> points_;
  int dims_;
  std::int64_t count_;
  std::array<double, kMostDims> period_{}, low_{}, extent_{}, width_{};
  std::array<std::int64_t, kMostDims> cells_{};
  std::vector<std::int64_t> begin_, order_;
};

void check_places(std::span<const double> points, std::span<const double> queries, int dims,
                  std::span<const double> box) {
  if (dims < 1 || dims > kMostDims)
    throw InvalidArgument("points of ", dims, " dims; give 1 to ", kMostDims);
  const auto n = static_cast<std::size_t>(dims);
  if (!box.empty() && box.size() != n)
    throw InvalidArgument("a box of ", box.size(), " periods for ", dims, " dims");
  for (const double period : box)
    if (!(period >= 0) || !std::isfinite(period))
      throw InvalidArgument("a period of ", period, "; give a length, or 0 for none");
  for (const auto& [places, name] : {std::pair(points, "point"), std::pair(queries, "query")}) {
    if (places.size() % n != 0)
      throw InvalidArgument(places.size(), " coordinates of each ", name, " in ", dims, " dims");
    const auto bad = std::ranges::find_if_not(places, [](double x) { return std::isfinite(x); });
    if (bad != places.end())
      throw InvalidArgument(name, ' ', (bad - places.begin()) / dims, " has a coordinate ", *bad);
  }
}

void append(Neighbors& all, std::int64_t query, const std::vector<Pair>& pairs, int dims) {
  for (const Pair& pair : pairs) {
    all.point.push_back(pair.point);
    all.query.push_back(query);
    all.image.insert(all.image.end(), pair.image.begin(), pair.image.begin() + dims);
    all.distance.push_back(pair.distance);
  }
}

// Of each point the nearest image.
void keep_nearest_images(std::vector<Pair>& pairs) {
  std::ranges::sort(pairs, {},
                    [](const Pair& p) { return std::tie(p.point, p.distance, p.image); });
  const auto again = std::ranges::unique(pairs, {}, &Pair::point);
  pairs.erase(again.begin(), again.end());
}

}  // namespace

Neighbors points_within(std::span<const double> points, std::span<const double> queries, int dims,
                        double radius, std::span<const double> box) {
  check_places(points, queries, dims, box);
  if (!(radius >= 0) || !std::isfinite(radius))
    throw InvalidArgument("a radius of ", radius, "; give a length");
  const CellGrid grid(points, dims, box, radius);
  Neighbors all;
  std::vector<Pair> pairs;
  const auto count = static_cast<std::int64_t>(queries.size()) / dims;
  for (std::int64_t q = 0; q < count; ++q) {
    pairs.clear();
    grid.within(queries.data() + q * dims, radius, [&](const Pair& p) { pairs.push_back(p); });
    std::ranges::sort(pairs, {}, [](const Pair& p) { return std::tie(p.point, p.image); });
    append(all, q, pairs, dims);
  }
  return all;
}

Neighbors nearest_points(std::span<const double> points, std::span<const double> queries, int dims,
                         int count, std::span<const double> box) {
  check_places(points, queries, dims, box);
  if (count < 1) throw InvalidArgument("the ", count, " nearest points; give at least 1");
  const CellGrid grid(points, dims, box, 0);
  Neighbors all;
  std::vector<Pair> pairs;
  const auto wanted = static_cast<std::size_t>(std::min<std::int64_t>(count, grid.count()));
  const auto number = static_cast<std::int64_t>(queries.size()) / dims;
  for (std::int64_t q = 0; q < number && wanted > 0; ++q) {
    const double* const query = queries.data() + q * dims;
    const double most = grid.farthest(query);
    // All that is as near as the last one of them is within the radius.
    for (double radius = std::min(most, grid.width());; radius = std::min(most, 2 * radius)) {
      pairs.clear();
      grid.within(query, radius, [&](const Pair& p) { pairs.push_back(p); });
      keep_nearest_images(pairs);
      if (pairs.size() >= wanted || radius >= most) break;
    }
    std::ranges::sort(pairs, {},
                      [](const Pair& p) { return std::tie(p.distance, p.point, p.image); });
    pairs.resize(std::min(pairs.size(), wanted));
    append(all, q, pairs, dims);
  }
  return all;
}

}  // namespace tessera
