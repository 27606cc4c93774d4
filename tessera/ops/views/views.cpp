// Views: every rank takes the view of its local. If the result's dims cannot be sharded as the
// input's are, the input is redistributed first, and the result is a copy, from which writes reach
// the input.

#include <ATen/core/function_schema.h>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/views/detail/view_parts.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"

namespace tessera::detail::views_rules {
namespace {

void require_dims(const OpCall& call) {
  if (call.tensor(0).spec.dims() == 0)
    throw InvalidArgument(call.name(), " of a tensor without dims");
}

// Dims of the result that are dims of the input, by position; the others come from none. `as`: how
// the input must be; empty: as it is.
Plan by_dims(const OpCall& call, const std::vector<int>& from, const std::set<int>& whole = {},
             const ShardSpec& as = {}) {
  Source source(call, as ? as : call.tensor(0).spec, whole);
  for (const OutputInfo& out : outputs_of(call))
    source.plan.outputs.push_back({mapped_spec(source.spec, out.shape, from, true)});
  return std::move(source.plan);
}

Plan same(const OpCall& call) { return by_dims(call, all_labels(call.tensor(0).spec.dims())); }

// Views of other values than the tensor's: for a sum they are the sum of the ranks' views. The real
// part of a product is not the product of the real parts, and the minimum of all negatives not the
// negative of the minimum: these are reduced first.
Plan linear_view(const OpCall& call, const std::vector<int>& from,
                 const std::set<int>& whole = {}) {
  const ShardSpec& given = call.tensor(0).spec;
  const bool linear = std::ranges::all_of(given.placements(), [](const Placement& p) {
    return !p.is_partial() || p.is_partial(ReduceOp::Kind::sum) ||
           p.is_partial(ReduceOp::Kind::avg);
  });
  return by_dims(call, from, whole, linear ? given : without_partial(given));
}

Plan transpose(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  auto from = all_labels(n);
  if (n > 1 || call.has("dim0")) {
    const auto a = call.has("dim0") ? normal_dim(call.integer("dim0"), n) : 0,
               b = call.has("dim1") ? normal_dim(call.integer("dim1"), n) : n - 1;
    if (n > 0) std::swap(from[a], from[b]);
  }
  return by_dims(call, from);
}

Plan permute(const OpCall& call) {
  std::vector<int> from;
  for (const auto d : call.integers("dims"))
    from.push_back(normal_dim(d, call.tensor(0).spec.dims()));
  return by_dims(call, from);
}

Plan unsqueeze(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  auto from = all_labels(n);
  from.insert(from.begin() + normal_dim(call.integer("dim"), n + 1), -1);
  return by_dims(call, from);
}

// Which dims are removed is decided by the global sizes; a dim of size 1 that is sharded is
// gathered first.
Plan squeeze(const OpCall& call) {
  const auto& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  std::set<int> gone;
  if (call.argument("dim") >= 0)
    for (const auto d : call.integers("dim")) gone.insert(normal_dim(d, n));
  else
    for (int d = 0; d < n; ++d) gone.insert(d);
  std::erase_if(gone, [&](int d) { return d >= n || shape[d] != 1; });
  auto from = all_labels(n);
  std::erase_if(from, [&](int d) { return gone.contains(d); });
  Plan plan = by_dims(call, from, gone);
  // The local may have dims of size 1 that the global tensor does not have: name the dims. squeeze,
  // squeeze.dim and squeeze.dims become one.
  plan.local = [dims = Shape(gone.begin(), gone.end())](const OperatorHandle&, Stack arguments) {
    return Stack{arguments[0].toTensor().squeeze(dims)};
  };
  return plan;
}

Plan expand(const OpCall& call) {
  const auto& shape = call.tensor(0).spec.shape();
  const auto& target = outputs_of(call)[0].shape;
  const int lead = static_cast<int>(target.size() - shape.size());
  std::vector<int> from(target.size(), -1);
  std::set<int> whole;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d)
    if (shape[d] == target[lead + d])
      from[lead + d] = d;
    else
      whole.insert(d);
  Plan plan = by_dims(call, from, whole);
  plan.arguments = {{call.argument("size"), plan.outputs[0].spec.local_shape()}};
  return plan;
}

// A slice along a sharded dim keeps the dim, with other sizes, and shares memory.
Plan slice(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  require_dims(call);
  const int d = normal_dim(call.integer("dim"), in.dims());
  if (!in.is_sharded(d)) return same(call);
  const std::int64_t step = call.integer("step"), extent = in.shape()[d];
  std::int64_t start = call.has("start") ? call.integer("start") : 0;
  if (start < 0) start += extent;
  start = std::clamp<std::int64_t>(start, 0, extent);
  const OutputInfo& out = outputs_of(call)[0];
  const ShardSpec spec = mapped_spec(in, out.shape, all_labels(in.dims()), true,
                                     {{d, kept(in.dim(d).partition, start, step, out.shape[d])}});
  const std::int64_t length = spec.local_shape()[d],
                     first = local_start(in, d, start, step, length);
  const std::int64_t end = length == 0 ? first : first + (length - 1) * step + 1;
  return {.outputs = {{spec}},
          .arguments = {{call.argument("start"), first}, {call.argument("end"), end}}};
}

Plan split(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  require_dims(call);
  const int d = normal_dim(call.integer("dim"), in.dims());
  if (!in.is_sharded(d)) return same(call);
  Plan plan;
  Shape sizes;
  std::int64_t begin = 0;
  for (const OutputInfo& out : outputs_of(call)) {
    const ShardSpec spec = mapped_spec(in, out.shape, all_labels(in.dims()), true,
                                       {{d, kept(in.dim(d).partition, begin, 1, out.shape[d])}});
    sizes.push_back(spec.local_shape()[d]);
    plan.outputs.push_back({spec});
    begin += out.shape[d];
  }
  plan.local = [sizes, d](const OperatorHandle&, Stack arguments) {
    return Stack{arguments[0].toTensor().split_with_sizes(sizes, d)};
  };
  return plan;
}

Plan select(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  require_dims(call);
  const int d = normal_dim(call.integer("dim"), n);
  auto from = all_labels(n);
  from.erase(from.begin() + d);
  return by_dims(call, from, {d});
}

// Of a dim over several ranks one row is gathered, not all: a slice, which shares memory, of which
// the dim is then taken off.
bool select_row(Stack* stack) {
  const auto a = torch::jit::last(*stack, 3);
  const at::Tensor self = a[0].toTensor();
  const ShardMeta* meta = meta_of(self);
  const std::int64_t n = self.dim(), dim = a[1].toInt();
  if (!meta || dim < -n || dim >= n) return false;
  const auto d = dim < 0 ? dim + n : dim;
  std::int64_t at = a[2].toInt();
  if (at < -self.size(d) || at >= self.size(d) || self.size(d) == 1 ||
      !is_distributed(meta->spec(), static_cast<int>(d)))
    return false;
  if (at < 0) at += self.size(d);
  return answer(stack, 3, self.slice(d, at, at + 1).squeeze(d));
}

Plan diagonal(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const int a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  auto from = all_labels(n);
  std::erase_if(from, [&](int d) { return d == a || d == b; });
  from.push_back(-1);
  return by_dims(call, from, {a, b});
}

// Windows along a sharded dim lie on the rank of their rows. Where they do not overlap boundaries
// are moved between them, if they are not there; windows that overlap are taken of all rows.
Plan unfold(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  const int d = normal_dim(call.integer("dimension"), in.dims());
  auto from = all_labels(in.dims());
  from.push_back(-1);
  const std::int64_t size = call.integer("size"), step = call.integer("step");
  const Shape& shape = outputs_of(call)[0].shape;
  std::optional<Partition> windows;
  if (in.dims() > 0 && in.is_sharded(d) && size <= step)
    windows = in_whole_units(in.dim(d).partition, shape[d], step);
  if (!windows) return by_dims(call, from, {d});
  Source source(call, with_parts(in, {{d, rows_of_windows(*windows, step, in.shape()[d])}}), {});
  const ShardSpec out = mapped_spec(source.spec, shape, from, true, {{d, *windows}});
  source.plan.outputs = {{out}};
  if (out.local_shape()[d] == 0) {
    source.plan.local = [size](const OperatorHandle&, Stack arguments) {
      const at::Tensor& t = arguments[0].toTensor();
      Shape none = t.sizes().vec();
      none.push_back(size);
      return Stack{t.unsqueeze(-1).expand(none)};
    };
  }
  return std::move(source.plan);
}

Plan view_dtype(const OpCall& call) {
  const OutputInfo& out = outputs_of(call)[0];
  if (out.shape != call.tensor(0).spec.shape() || call.tensor(0).spec.has_partial())
    throw ShardingError(
        "view(dtype) of another element size, or of a partial value, has no rule: redistribute to "
        "Replicate first");
  return same(call);
}

const AtStart registered([] {
  register_rules({"aten::alias", "aten::detach", "aten::_conj", "aten::_conj_physical"}, same);
  register_rule("aten::_neg_view", [](const OpCall& call) {
    return linear_view(call, all_labels(call.tensor(0).spec.dims()));
  });
  register_rule("aten::view_as_real", [](const OpCall& call) {
    auto from = all_labels(call.tensor(0).spec.dims());
    from.push_back(-1);
    return linear_view(call, from);
  });
  register_rule("aten::view_as_complex", [](const OpCall& call) {
    const int n = call.tensor(0).spec.dims();
    return linear_view(call, all_labels(n - 1), {n - 1});
  });
  register_rules({"aten::t", "aten::transpose"}, transpose);
  register_rule("aten::permute", permute);
  register_rule("aten::unsqueeze", unsqueeze);
  register_rule("aten::squeeze", squeeze);
  register_rule("aten::expand", expand);
  register_rule("aten::slice.Tensor", slice);
  register_rules({"aten::split.Tensor", "aten::split_with_sizes", "aten::unsafe_split.Tensor",
                  "aten::unsafe_split_with_sizes"},
                 split);
  register_rules({"aten::select.int", "aten::unbind.int"}, select);
  register_rules({"aten::diagonal", "aten::diagonal_copy"}, diagonal);
  register_rule("aten::unfold", unfold);
  register_rule("aten::view.dtype", view_dtype);
  register_above("aten::select.int", select_row);
  // What forward-mode differentiation asks of a value and its tangent.
  for (const char* op : {"is_same_size", "_has_same_storage_numel"})
    register_decomposition(op, [](const at::Tensor& self, const at::Tensor& other) {
      return self.sizes() == other.sizes();
    });
});

}  // namespace
}  // namespace tessera::detail::views_rules
