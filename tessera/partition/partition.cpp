#include "tessera/partition/partition.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

void check(std::int64_t extent, std::int64_t parts) {
  if (extent < 0)
    throw InvalidArgument("a partition of ", extent, " indices; give an extent of at least 0");
  if (parts < 1 || parts > std::numeric_limits<int>::max())
    throw InvalidArgument("a partition into ", parts, " shards; give at least 1");
}

}  // namespace

Partition::Partition(std::span<const std::int64_t> sizes) {
  offsets_.reserve(sizes.size() + 1);
  offsets_.push_back(0);
  for (std::int64_t size : sizes) {
    if (size < 0)
      throw InvalidArgument("a shard of ", size, " indices in ", list(sizes),
                            "; sizes are at least 0");
    if (size > std::numeric_limits<std::int64_t>::max() - offsets_.back())
      throw InvalidArgument("the sizes ", list(sizes), " add up to more than 2^63 - 1");
    offsets_.push_back(offsets_.back() + size);
  }
}

Partition Partition::even(std::int64_t extent, int parts) {
  check(extent, parts);
  std::vector<std::int64_t> sizes(parts, extent / parts);
  for (std::int64_t i = 0; i < extent % parts; ++i) ++sizes[i];
  return Partition(sizes);
}

Partition Partition::chunked(std::int64_t extent, int parts) {
  check(extent, parts);
  const std::int64_t full = extent / parts + (extent % parts != 0);
  std::vector<std::int64_t> sizes(parts);
  for (std::int64_t& size : sizes) {
    size = std::min(full, extent);
    extent -= size;
  }
  return Partition(sizes);
}

Partition Partition::weighted(std::int64_t extent, std::span<const double> weights) {
  check(extent, static_cast<std::int64_t>(weights.size()));
  double total = 0;
  for (double w : weights) {
    if (!(w >= 0) || !std::isfinite(w))
      throw InvalidArgument("weight ", w, " in ", list(weights),
                            "; weights are finite and at least 0");
    total += w;
  }
  if (!(total > 0) || !std::isfinite(total))
    throw InvalidArgument("the weights ", list(weights), " add up to ", total,
                          "; give a finite sum above 0");
  std::vector<std::int64_t> sizes(weights.size());
  std::vector<double> remainder(weights.size());
  std::int64_t given = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double share = static_cast<double>(extent) * (weights[i] / total);
    // rounding may exceed the extent if it is above 2^53
    sizes[i] = std::min(static_cast<std::int64_t>(share), extent - given);
    remainder[i] = share - static_cast<double>(sizes[i]);
    given += sizes[i];
  }
  std::vector<std::size_t> order = numbers_below(weights.size());
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return remainder[i]; });
  // The rest is below the number of positive shards, except for extents above 2^53: then the
  // largest shard takes what is left.
  for (std::size_t i = 0; i < order.size() && given < extent; ++i)
    if (weights[order[i]] > 0) ++sizes[order[i]], ++given;
  if (given < extent) sizes[std::ranges::max_element(weights) - weights.begin()] += extent - given;
  return Partition(sizes);
}

std::vector<std::int64_t> Partition::sizes() const {
  std::vector<std::int64_t> sizes(parts());
  for (int p = 0; p < parts(); ++p) sizes[p] = size(p);
  return sizes;
}

int Partition::owner(std::int64_t i) const {
  if (i < 0 || i >= extent())
    throw InvalidArgument("index ", i, " of a partition with extent ", extent());
  return static_cast<int>(std::ranges::upper_bound(offsets_, i) - offsets_.begin()) - 1;
}

Interval Partition::overlapping(Interval range) const {
  range = intersect(range, {0, extent()});
  if (range.empty()) return {0, 0};
  return {owner(range.begin), owner(range.end - 1) + 1};
}

}  // namespace tessera
