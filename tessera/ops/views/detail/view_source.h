#pragma once
// What rules of views share: the input as a view needs it.

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/partition/partition.h"

namespace tessera::detail::views_rules {

/// The first input as it must be, and how it is sharded then.
struct Source {
  Plan plan;
  ShardSpec spec;

  Source(const OpCall& call, const std::set<int>& whole)
      : Source(call, call.tensor(0).spec, whole) {}
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

}  // namespace tessera::detail::views_rules
