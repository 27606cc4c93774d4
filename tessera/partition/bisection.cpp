#include "tessera/partition/bisection.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/partition/detail/points.h"

namespace tessera {
namespace {

class Bisection {
 public:
  Bisection(std::span<const double> coordinates, int dims, std::span<const double> weights)
      : coordinates_(coordinates),
        dims_(static_cast<std::size_t>(dims)),
        weights_(weights),
        order_(coordinates.size() / dims_),
        part_(order_.size(), 0) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }
  std::vector<int> run(int parts) {
    divide(0, order_.size(), 0, parts);
    return std::move(part_);
  }

 private:
  double at(std::size_t point, std::size_t dim) const { return coordinates_[point * dims_ + dim]; }

  // The points order_[begin, end) among the parts [first, first + parts).
  void divide(std::size_t begin, std::size_t end, int first, int parts) {
    if (parts == 1 || begin == end) {
      for (std::size_t i = begin; i < end; ++i) part_[order_[i]] = first;
      return;
    }
    const std::size_t dim = widest(begin, end);
    std::sort(order_.begin() + static_cast<std::ptrdiff_t>(begin),
              order_.begin() + static_cast<std::ptrdiff_t>(end), [&](std::size_t a, std::size_t b) {
                return at(a, dim) != at(b, dim) ? at(a, dim) < at(b, dim) : a < b;
              });
    const int half = parts / 2;
    const std::size_t middle = cut(begin, end, half, parts);
    divide(begin, middle, first, half);
    divide(middle, end, first + half, parts - half);
  }
  std::size_t widest(std::size_t begin, std::size_t end) const {
    std::size_t widest = 0;
    double most = -1;
    for (std::size_t d = 0; d < dims_; ++d) {
      double low = at(order_[begin], d), high = low;
      for (std::size_t i = begin; i < end; ++i) {
        low = std::min(low, at(order_[i], d));
        high = std::max(high, at(order_[i], d));
      }
      if (high - low > most) {
        most = high - low;
        widest = d;
      }
    }
    return widest;
  }
  // Where the first `half` of `parts` parts end.
  std::size_t cut(std::size_t begin, std::size_t end, int half, int parts) const {
    const auto n = static_cast<std::int64_t>(end - begin);
    if (weights_.empty()) {
      // The first n % parts parts have one more, as in Partition::even().
      const std::int64_t rows = n / parts * half + std::min<std::int64_t>(n % parts, half);
      return begin + static_cast<std::size_t>(rows);
    }
    double all = 0;
    for (std::size_t i = begin; i < end; ++i) all += weights_[order_[i]];
    const double wanted = all * half / parts;
    double before = 0;
    std::size_t i = begin;
    while (i < end && before + weights_[order_[i]] / 2 < wanted) before += weights_[order_[i++]];
    return i;
  }

  const std::span<const double> coordinates_;
  const std::size_t dims_;
  const std::span<const double> weights_;
  std::vector<std::size_t> order_;
  std::vector<int> part_;
};

}  // namespace

std::vector<int> bisect_points(std::span<const double> coordinates, int dims, int parts,
                               std::span<const double> weights) {
  detail::checked_points(coordinates, dims, parts, weights);
  return Bisection(coordinates, dims, weights).run(parts);
}

std::int64_t PartitionQuality::ghost_rows() const {
  return std::accumulate(ghosts.begin(), ghosts.end(), std::int64_t{0});
}

double PartitionQuality::imbalance() const {
  if (nodes == 0) return 1;
  return static_cast<double>(*std::max_element(sizes.begin(), sizes.end())) *
         static_cast<double>(sizes.size()) / static_cast<double>(nodes);
}

std::string PartitionQuality::summary() const {
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  const double share = edges == 0 ? 0 : 100 * static_cast<double>(cut) / static_cast<double>(edges);
  return concat(sizes.size(), " parts of ", nodes, " nodes: ", *least, " to ", *most,
                ", imbalance ", fixed(imbalance(), 2), "; ", cut, " of ", edges, " edges cut (",
                fixed(share, 1), "%), ", ghost_rows(), " ghosts, at most ",
                *std::max_element(ghosts.begin(), ghosts.end()), " in a part, at most ",
                *std::max_element(peers.begin(), peers.end()), " peers\n");
}

PartitionQuality quality_of(std::span<const int> owner, int parts,
                            std::span<const std::int64_t> source,
                            std::span<const std::int64_t> target) {
  if (parts < 1) throw InvalidArgument(concat(parts, " parts; give at least 1"));
  detail::check_edges(static_cast<std::int64_t>(owner.size()), source, target);
  const auto n = static_cast<std::size_t>(parts);
  PartitionQuality quality{static_cast<std::int64_t>(owner.size()),
                           static_cast<std::int64_t>(source.size()),
                           0,
                           std::vector<std::int64_t>(n, 0),
                           std::vector<std::int64_t>(n, 0),
                           std::vector<std::int64_t>(n, 0)};
  for (std::size_t i = 0; i < owner.size(); ++i) {
    if (owner[i] < 0 || owner[i] >= parts)
      throw InvalidArgument(concat("node ", i, " has the owner ", owner[i], " of ", parts));
    ++quality.sizes[static_cast<std::size_t>(owner[i])];
  }
  // The sources that each part needs of others, part by part.
  std::vector<std::vector<std::int64_t>> needed(n);
  for (std::size_t e = 0; e < source.size(); ++e) {
    const auto from = owner[static_cast<std::size_t>(source[e])];
    const auto to = owner[static_cast<std::size_t>(target[e])];
    if (from == to) continue;
    ++quality.cut;
    needed[static_cast<std::size_t>(to)].push_back(source[e]);
  }
  for (std::size_t r = 0; r < n; ++r) {
    std::sort(needed[r].begin(), needed[r].end());
    needed[r].erase(std::unique(needed[r].begin(), needed[r].end()), needed[r].end());
    quality.ghosts[r] = static_cast<std::int64_t>(needed[r].size());
    std::set<int> from;
    for (const std::int64_t node : needed[r]) from.insert(owner[static_cast<std::size_t>(node)]);
    quality.peers[r] = static_cast<std::int64_t>(from.size());
  }
  return quality;
}

}  // namespace tessera
