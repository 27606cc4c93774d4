// Operators that autograd uses for the gradients of views.

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/views/detail/view_parts.h"

namespace tessera::detail::view_backward_rules {

namespace {

// The shards along the dim that was sliced, of which the gradient only says where its elements lie.
// Even ones, if the slice may be of such; else what lies between the elements of two ranks belongs
// to the first, and what is around those of one rank to the ranks that even shards would give it.
Shape before_slicing(const Partition& slice, std::int64_t start, std::int64_t step,
                     std::int64_t extent) {
  const Partition even = Partition::even(extent, slice.parts());
  if (kept(even, start, step, slice.extent()) == slice) return even.sizes();
  const Shape given = slice.sizes();
  const bool on_one = std::ranges::count_if(given, [](std::int64_t n) { return n > 0; }) == 1;
  const std::int64_t behind = start + (slice.extent() - 1) * step + 1;
  Shape sizes;
  std::int64_t at = 0;
  for (int i = 0; i < slice.parts(); ++i) {
    const std::int64_t end = slice.interval(i).end, as_even = even.interval(i).end;
    const bool before = end == 0, last = i + 1 == slice.parts();
    std::int64_t to = start + end * step;
    if (before) to = on_one ? std::min(as_even, start) : 0;
    if (end == slice.extent()) to = on_one && !last ? std::max(as_even, behind) : extent;
    sizes.push_back(std::max<std::int64_t>(to - at, 0));
    at = std::max(at, to);
  }
  return sizes;
}

Plan slice_backward(const OpCall& call) {
  const ShardSpec& g = call.tensor(0).spec;
  const Shape sizes = call.integers("input_sizes");
  const int d = static_cast<int>(normal_dim(call.integer("dim"), g.dims()));
  const std::int64_t step = call.integer("step"), extent = sizes[d];
  const auto clamp = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + extent : i, 0, extent);
  };
  const std::int64_t start = clamp(call.integer("start"));
  Plan plan;
  Shape local_sizes, parts;
  std::int64_t local_start = start;
  if (g.is_sharded(d)) {
    parts = before_slicing(g.dim(d).partition, start, step, extent);
  }
  std::vector<std::pair<int, Partition>> given;
  if (!parts.empty()) given.emplace_back(d, Partition(std::span<const std::int64_t>(parts)));
  const ShardSpec out = mapped_spec(g, sizes, identity(g.dims()), true, given);
  if (!parts.empty()) {
    const LocalSlice mine =
        local_slice(out, d, start + g.local_offset()[d] * step, step, g.local_shape()[d]);
    local_start = mine.start;
  }
  const std::int64_t local_end =
      std::min(local_start + std::max<std::int64_t>(g.local_shape()[d] - 1, 0) * step +
                   (g.local_shape()[d] > 0 ? 1 : 0),
               out.local_shape()[d]);
  plan.outputs = {{out, contiguous_strides(sizes)}};
  plan.arguments = {{call.argument("input_sizes"), int_list(out.local_shape())},
                    {call.argument("start"), local_start},
                    {call.argument("end"), local_end}};
  return plan;
}

Plan with_input_sizes(const OpCall& call, const std::vector<int>& from, const std::set<int>& whole,
                      const std::vector<std::pair<int, Partition>>& parts = {}) {
  const Shape sizes = call.integers("input_sizes");
  Plan plan;
  const ShardSpec g = with_unsharded_dims(call.tensor(0).spec, whole);
  const ShardSpec out = mapped_spec(g, sizes, from, true, parts);
  plan.inputs = {g};
  plan.outputs = {{out, contiguous_strides(sizes)}};
  plan.arguments = {{call.argument("input_sizes"), int_list(out.local_shape())}};
  return plan;
}

Plan select_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  std::vector<int> from;
  for (int i = 0; i < n; ++i) from.push_back(i == d ? -1 : i < d ? i : i - 1);
  return with_input_sizes(call, from, {});
}

Plan unfold_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  auto from = identity(n);
  const ShardSpec& g = call.tensor(0).spec;
  const std::int64_t step = call.integer("step");
  if (call.integer("size") > step || g.dims() != n + 1 || !g.is_sharded(d)) {
    from[d] = -1;
    return with_input_sizes(call, from, {d, n});
  }
  return with_input_sizes(
      call, from, {n},
      {{d, rows_of_windows(g.dim(d).partition, step, call.integers("input_sizes")[d])}});
}

Plan diagonal_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  std::vector<int> from;
  int next = 0;
  for (int i = 0; i < n; ++i) from.push_back(i == a || i == b ? -1 : next++);
  return with_input_sizes(call, from, {n - 2});
}

const AtStart registered([] {
  register_rule("aten::slice_backward", slice_backward);
  register_rule("aten::select_backward", select_backward);
  register_rule("aten::unfold_backward", unfold_backward);
  register_rule("aten::diagonal_backward", diagonal_backward);
});

}  // namespace

}  // namespace tessera::detail::view_backward_rules
