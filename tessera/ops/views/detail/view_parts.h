#pragma once
// Helpers shared by rules of views and of their gradients.

#include <algorithm>

#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail {

/// Sizes of the shards of a dim of which only indices start, start + step, ... (count of them) are
/// kept.
inline Partition kept(const Partition& parts, std::int64_t start, std::int64_t step,
                      std::int64_t count) {
  return with_boundaries(parts, [&](std::int64_t end) {
    return end <= start ? 0 : std::min(ceil_div(end - start, step), count);
  });
}

/// The rows of a dim of `extent` of which windows are taken every `step` rows and none overlaps:
/// each window's with it, and those behind the last one with that.
inline Partition rows_of_windows(const Partition& windows, std::int64_t step, std::int64_t extent) {
  return with_boundaries(
      windows, [&](std::int64_t end) { return end == windows.extent() ? extent : end * step; });
}

/// Where the slice start, start + step, ... begins in this rank's local, of which it has `length`
/// indices.
inline std::int64_t local_start(const ShardSpec& in, int d, std::int64_t start, std::int64_t step,
                                std::int64_t length) {
  const std::int64_t begin = in.local_offset()[d];
  if (start < begin) start += ceil_div(begin - start, step) * step;
  return length == 0 ? 0 : start - begin;
}

namespace views_rules {

/// The first input as it must be, and how it is sharded then.
struct Source {
  Plan plan;
  ShardSpec spec;

  Source(const OpCall& call, const ShardSpec& as, const std::set<int>& whole)
      : spec(with_unsharded_dims(as, whole)) {
    plan.inputs = {spec};
    plan.view_copied = !(spec == call.tensor(0).spec);
  }
};

/// The results as the meta kernel gives them. Throws ShardingError without one.
inline const std::vector<OutputInfo>& outputs_of(const OpCall& call) {
  const auto* out = call.outputs();
  if (!out) throw ShardingError(call.name(), " has no meta kernel");
  return *out;
}

/// The partition, in units, with the boundaries moved to the nearest of `units` that begin every
/// `rows` rows, the last ending with the dim. Of the ranks that have rows as many keep some as
/// there are units. nullopt if all of it would be on one rank.
inline std::optional<Partition> in_whole_units(const Partition& parts, std::int64_t units,
                                               std::int64_t rows) {
  const Shape given = parts.sizes();
  std::int64_t behind = std::ranges::count_if(given, [](std::int64_t n) { return n > 0; });
  if (std::min(units, behind) < 2) return std::nullopt;
  const bool each = units >= behind;
  Shape sizes;
  std::int64_t last = 0, at = 0;
  for (const std::int64_t n : given) {
    at += n;
    std::int64_t boundary = last;
    if (n > 0) {
      --behind;
      const std::int64_t low = each && behind > 0 ? last + 1 : std::max(last, units - behind),
                         high = each ? units - behind : std::min(units, last + 1);
      boundary = std::clamp((at + rows / 2) / rows, low, std::max(low, high));
    }
    sizes.push_back(boundary - last);
    last = boundary;
  }
  return Partition(sizes);
}

}  // namespace views_rules
}  // namespace tessera::detail
