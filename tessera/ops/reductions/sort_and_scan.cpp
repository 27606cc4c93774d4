// Sorts, scans and selections along one dim. Extremes, their indices and logsumexp are combined
// from those of the shards if the dim is sharded; for the others the dim must not be sharded.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cumprod.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "tessera/ops/reductions/detail/reduced.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::sort_and_scan_rules {
namespace {

// The spec in which every axis that shards one of `dims` over several ranks shards another dim
// instead, the longest that no axis shards and that has an element for each rank: what moves is one
// shard per rank, not the whole to all. nullopt if an axis finds no other dim.
std::optional<ShardSpec> with_other_dims_sharded(const ShardSpec& spec, const std::set<int>& dims) {
  auto placements = spec.placements();
  std::set<int> taken = dims;
  for (int d = 0; d < spec.dims(); ++d)
    if (spec.is_sharded(d)) taken.insert(d);
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!placements[a].is_shard() || !dims.contains(placements[a].dim)) continue;
    placements[a] = Replicate();
    const int ranks = context_of(spec)->sizes[a];
    if (ranks == 1) continue;
    int longest = -1;
    for (int d = 0; d < spec.dims(); ++d) {
      if (taken.contains(d) || spec.shape()[d] < ranks) continue;
      if (longest < 0 || spec.shape()[d] > spec.shape()[longest]) longest = d;
    }
    if (longest < 0) return std::nullopt;
    placements[a] = Shard(longest);
    taken.insert(longest);
  }
  return spec.with_placements(placements);
}

// For an operator of one tensor that needs complete lines along `dims`, which are sharded: the axes
// that shard them shard other dims, and so do the results. `from`: the input's dim that each dim of
// the results is. nullopt where the tensor is to be gathered along `dims`.
std::optional<Plan> on_other_dims(const OpCall& call, const std::set<int>& dims,
                                  const std::vector<int>& from, const Shape& result) {
  const TensorInfo& x = call.tensor(0);
  if (call.in_place() || call.tensors().size() != 1 || x.spec.has_partial()) return std::nullopt;
  if (std::ranges::none_of(dims, [&](int d) { return is_distributed(x.spec, d); }))
    return std::nullopt;
  const auto in = with_other_dims_sharded(x.spec, dims);
  if (!in) return std::nullopt;
  const Plan::Output out{mapped_spec(*in, result, from, false)};
  return Plan{.inputs = {*in}, .outputs = std::vector(call.schema().returns().size(), out)};
}

// Results with and without the reduced dim, all of one shape, and the dim not sharded: max.dim,
// argmax, median...
Plan along_reduced(const OpCall& call) {
  const auto dims = reduced_dims(call);
  LabelProblem p = over_dims(call, dims, call.schema().returns().size());
  if (auto plan = on_other_dims(call, dims, p.outputs[0], p.output_shapes[0]))
    return *std::move(plan);
  for (const int d : dims) p.inputs[0][d] = kUnsharded;
  if (call.outputs()) p.output_shapes.clear();
  return solve(p);
}

// The place in the global tensor, counted in rows, of an element of this rank's shard.
at::Tensor global_place(const at::Tensor& local_place, const ShardSpec& spec) {
  const auto at = coordinates(local_place, spec.local_shape());
  at::Tensor place = at::zeros_like(local_place);
  for (std::size_t d = 0; d < at.size(); ++d)
    place = place * spec.shape()[d] + at[d] + spec.local_offset()[d];
  return place;
}

// The largest (or smallest) value along one sharded dim, or of all, and its index: the extreme of
// the ranks' extremes, and the first of the indices where it occurs, as in plain libtorch. NaN
// counts as more extreme than all.
Plan extreme_along(const OpCall& call, bool largest, bool with_values) {
  const TensorInfo& x = call.tensor(0);
  const std::set<int> dims = reduced_dims(call);
  const bool sharded = std::ranges::any_of(dims, [&](int k) { return x.spec.is_sharded(k); });
  if (!sharded || x.spec.numel() == 0) return along_reduced(call);
  const bool keep = keeps(call);
  Plan plan = solve(over_dims(call, dims, with_values ? 2 : 1));
  const std::vector<int> axes = reduce_inside(plan.outputs[0]);
  if (with_values) reduce_inside(plan.outputs[1]);
  if (axes.empty()) return plan;
  const bool all = !call.has("dim");  // argmax() counts the elements
  plan.local = [over = OverRanks{context_of(x.spec), axes, "extreme"}, all,
                d = all ? 0 : *dims.begin(), keep, largest, with_values, in = *plan.inputs[0],
                result = plan.outputs[0].spec.local_shape()](const OperatorHandle&, Stack a) {
    const at::Tensor t = all ? a[0].toTensor().reshape({-1}) : a[0].toTensor();
    const std::int64_t extent = all ? in.numel() : in.shape()[d];
    const bool floating = at::isFloatingType(t.scalar_type());
    // Collectives of all backends support these dtypes.
    const auto type =
        floating ? (t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat) : at::kLong;
    auto shape = t.sizes().vec();
    shape[d] = 1;
    const auto how = largest ? ReduceOp::max : ReduceOp::min;
    const at::Scalar worst = neutral(type, !largest);
    at::Tensor value = at::full(shape, worst, t.options().dtype(type)),
               place = at::full(shape, extent, t.options().dtype(at::kLong));
    if (t.size(d) > 0) {
      const auto [v, i] = largest ? at::max(t, d, true) : at::min(t, d, true);
      value = v.to(type);
      place = all ? global_place(i, in) : i + in.local_offset()[d];
    }
    const at::Tensor unknown = value.isnan();
    // 1 if some rank has a NaN, which then is the result
    const at::Tensor any_unknown =
        floating ? over(unknown.to(at::kFloat), ReduceOp::max).to(at::kBool) : unknown;
    const at::Tensor best = over(at::where(unknown, at::full_like(value, worst), value), how);
    const at::Tensor has_best =
        at::where(any_unknown, unknown, value.eq(best)).logical_and(place.lt(extent));
    at::Tensor first =
        over(at::where(has_best, place, at::full_like(place, extent)), ReduceOp::min);
    if (all) return Stack{first.view(result)};
    if (!keep) first = first.squeeze(d);
    if (!with_values) return Stack{first};
    at::Tensor found = best.to(t.scalar_type());
    if (floating) found = found.masked_fill(any_unknown, std::numeric_limits<double>::quiet_NaN());
    return Stack{keep ? found : found.squeeze(d), first};
  };
  return plan;
}

// log(sum(exp(x))) from the ranks' shards.
Plan logsumexp(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const auto dims = reduced_dims(call);
  const bool sharded = std::ranges::any_of(dims, [&](int d) { return x.spec.is_sharded(d); });
  if (!sharded || !at::isFloatingType(x.dtype)) return along_reduced(call);
  Plan plan = solve(over_dims(call, dims));
  const std::vector<int> axes = reduce_inside(plan.outputs[0]);
  if (axes.empty()) return plan;
  plan.local = [over = OverRanks{context_of(x.spec), axes, "logsumexp"},
                empty = plan.inputs[0]->local_numel() == 0,
                shape = plan.outputs[0].spec.local_shape(),
                type = x.dtype](const OperatorHandle& op, Stack a) {
    at::Tensor part;
    if (empty) {
      part = at::full(shape, -std::numeric_limits<double>::infinity(),
                      a[0].toTensor().options().dtype(at::toOpMathType(type)));
    } else {
      a[0] = a[0].toTensor().to(at::toOpMathType(type));
      op.callBoxed(a);
      part = a[0].toTensor();
    }
    const at::Tensor top = over(part.clone(), ReduceOp::max);
    // infinite values have no distance from themselves
    const at::Tensor from = at::where(top.isinf(), at::zeros_like(top), top);
    return Stack{(over((part - from).exp()).log() + from).to(type)};
  };
  return plan;
}

// Same number of dims in and out, `dim` not sharded, the others free: cumsum, sort, topk...
Plan along(const OpCall& call) {
  const int n = call.tensor(0).spec.dims(), dim = normal_dim(call.integer("dim"), n);
  const auto* made = call.outputs();
  const Shape& shape = call.tensor(0).spec.shape();
  if (n > 0 && (!made || (!made->empty() && (*made)[0].shape == shape))) {
    if (auto plan = on_other_dims(call, {dim}, all_labels(n), shape)) return *std::move(plan);
  }
  Labels labels = all_labels(n);
  if (n > 0) labels[dim] = kUnsharded;
  for (const TensorInfo& t : call.tensors())
    for (int d = 0; d < n && t.spec.dims() == n; ++d)
      if (t.spec.shape()[d] != shape[d]) labels[d] = kUnsharded;
  LabelProblem p(call, {}, std::vector(call.schema().returns().size(), labels));
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(t.spec.dims() == n ? labels : unsharded_labels(t));
  // the result of a backward has the shape of what was differentiated
  const TensorInfo* self = call.find("self");
  if (!call.outputs())
    p.output_shapes.assign(p.outputs.size(), (self ? *self : call.tensor(0)).spec.shape());
  return solve(p);
}

// Along a sharded dim each rank sends its own k largest; every rank takes the k largest of these.
Plan topk(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  if (n == 0 || call.in_place()) return along(call);
  const int d = normal_dim(call.integer("dim"), n);
  const std::int64_t k = call.integer("k");
  if (!is_distributed(x.spec, d) || k < 0 || k > x.spec.shape()[d]) return along(call);
  Labels out = all_labels(n);
  out[d] = kUnsharded;
  auto shape = x.spec.shape();
  shape[d] = k;
  LabelProblem p(call, {all_labels(n)}, {out, out}, {shape, shape});
  p.contract = {d};
  Plan plan = solve(p);
  const bool sharded = !reduce_inside(plan.outputs[0]).empty();
  reduce_inside(plan.outputs[1]);
  if (!sharded) return plan;
  const ShardSpec& in = *plan.inputs[0];
  const Partition parts(
      mapped(in.dim(d).partition.sizes(), [&](std::int64_t size) { return std::min(size, k); }));
  shape[d] = parts.extent();
  const ShardSpec from = mapped_spec(in, shape, all_labels(n), false, {{d, parts}});
  plan.local = [from, to = with_unsharded_dims(from, {d}), d, k, begin = in.local_offset()[d]](
                   const OperatorHandle&, Stack a) {
    const at::Tensor t = a[0].toTensor();
    const bool largest = a[3].toBool(), sorted = a[4].toBool();
    const auto [values, places] = at::topk(t, std::min(k, t.size(d)), d, largest, sorted);
    const at::Tensor all = redistribute_local(values.contiguous(), from, to),
                     at = redistribute_local((places + begin).contiguous(), from, to);
    const auto [best, among] = at::topk(all, k, d, largest, sorted);
    return Stack{best, at.gather(d, among)};
  };
  return plan;
}

// Backward of max.dim, sort, topk, kthvalue, mode...: the gradient goes where the values came from.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, std::int64_t dim,
                                              const at::Tensor& indices, c10::SymIntArrayRef sizes,
                                              bool keepdim) {
  if (sizes.empty()) return grad.reshape({}) * 1;
  const at::Tensor g = keepdim ? grad : grad.unsqueeze(dim),
                   at = keepdim ? indices : indices.unsqueeze(dim);
  return zeros_along(g, dim, sizes).scatter(dim, at, g);
}

at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& indices, std::int64_t dim) {
  if (input.numel() == 0) return input;
  return at::zeros_like(input).scatter_add(dim, indices, grad);
}

// The values at places `at` along the last dim of x, which is sorted; `how`: between two of them.
at::Tensor interpolated(const at::Tensor& x, at::Tensor at, c10::string_view how) {
  if (how == "nearest") at = at.round();
  if (how == "lower") at = at.floor();
  if (how == "higher") at = at.ceil();
  const at::Tensor below = at.to(at::kLong);
  at::Tensor value = at::gather(x, -1, below);
  if (how != "linear" && how != "midpoint") return value;
  const at::Tensor above = at::gather(x, -1, at.ceil().to(at::kLong));
  return at::lerp(value, above, how == "midpoint" ? at::full_like(at, 0.5) : at - below.to(at));
}

void check_quantile(const char* name, const at::Tensor& x, const at::Tensor& q,
                    c10::string_view how) {
  TORCH_CHECK(
      how == "linear" || how == "lower" || how == "higher" || how == "midpoint" || how == "nearest",
      name, ": no interpolation is called ", how,
      "; there are linear, lower, higher, midpoint and nearest");
  const auto type = x.scalar_type();
  TORCH_CHECK(x.numel() > 0, name, ": the input has no elements");
  TORCH_CHECK(type == at::kFloat || type == at::kDouble, name, ": the input is ", type,
              ", and must be Float or Double; convert it");
  TORCH_CHECK(q.dim() <= 1, name, ": q has ", q.dim(), " dims, and may have 1");
  TORCH_CHECK(q.scalar_type() == type, name, ": q is ", q.scalar_type(), ", the input is ", type,
              "; convert one of them");
  TORCH_CHECK(q.ge(0).logical_and(q.le(1)).all().item<bool>(), name,
              ": values of q must be between 0 and 1");
}

// The value at the place q * (n - 1) of n sorted ones. NaN stands last: it is the result wherever
// there is one, or is not counted (`skip_nan`).
template <bool skip_nan>
at::Tensor quantile(const at::Tensor& self, const at::Tensor& q, std::optional<std::int64_t> dim,
                    bool keepdim, c10::string_view how) {
  constexpr const char* name = skip_nan ? "nanquantile" : "quantile";
  check_quantile(name, self, q, how);
  const bool one_dim = dim && self.dim() > 0;
  const std::int64_t d = dim ? normal_dim(*dim, std::max<std::int64_t>(self.dim(), 1)) : 0;
  const at::Tensor x = std::get<0>((one_dim ? self.movedim(d, -1) : self.flatten()).sort());
  const at::Tensor unknown = x.isnan(), share = q.reshape({-1});
  const double last = static_cast<double>(x.size(-1) - 1);
  const at::Tensor place =
      skip_nan ? (unknown.logical_not().sum(-1, true) - 1).clamp_min(0).to(x.scalar_type()) * share
               : at::where(unknown.any(-1, true), last, share * last);
  at::Tensor value = interpolated(x, place, how);
  if (keepdim && one_dim) value = value.unsqueeze(d);
  if (keepdim && !one_dim) {
    std::vector<std::int64_t> shape(self.dim(), 1);
    shape.push_back(value.size(-1));
    value = value.view(shape);
  }
  return q.dim() == 0 ? value.squeeze(-1) : value.movedim(-1, 0);
}

template <bool skip_nan>
at::Tensor quantile_scalar(const at::Tensor& self, double q, std::optional<std::int64_t> dim,
                           bool keepdim, c10::string_view how) {
  return quantile<skip_nan>(self, at::scalar_tensor(q, self.options()), dim, keepdim, how);
}

// Along a dim that is sharded the scan moves its input, which a target may not: what it makes is
// written back. Elsewhere each rank scans what it has.
template <at::Tensor (*scan)(const at::Tensor&, std::int64_t, std::optional<at::ScalarType>)>
bool scan_in_place(Stack* stack) {
  const auto a = torch::jit::last(*stack, 3);
  const at::Tensor self = a[0].toTensor();
  const std::int64_t dim = a[1].toInt();
  const auto dtype = a[2].toOptional<at::ScalarType>();
  const std::int64_t n = self.dim();
  if (!meta_of(self) || n == 0 || dim < -n || dim >= n ||
      !meta_of(self)->spec().is_sharded(normal_dim(dim, n)) ||
      (dtype && *dtype != self.scalar_type()))
    return false;
  // What backward saves must not be written over.
  const at::Tensor before = self.requires_grad() ? self.clone() : self;
  self.copy_(scan(before, dim, self.scalar_type()));
  return answer(stack, 3, self);
}

const AtStart registered([] {
  register_rules({"aten::median.dim", "aten::nanmedian.dim", "aten::mode", "aten::kthvalue"},
                 along_reduced);
  register_rule("aten::topk", topk);
  register_rule("aten::max.dim", [](const OpCall& c) { return extreme_along(c, true, true); });
  register_rule("aten::min.dim", [](const OpCall& c) { return extreme_along(c, false, true); });
  register_rule("aten::argmax", [](const OpCall& c) { return extreme_along(c, true, false); });
  register_rule("aten::argmin", [](const OpCall& c) { return extreme_along(c, false, false); });
  register_rule("aten::logsumexp", logsumexp);
  register_rules({"aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::sort",
                  "aten::sort.stable", "aten::_safe_softmax", "aten::cummax", "aten::cummin",
                  "aten::glu", "aten::glu_backward", "aten::linalg_cross"},
                 along);
  register_decomposition("value_selecting_reduction_backward", value_selecting_reduction_backward);
  register_decomposition("cummaxmin_backward", cummaxmin_backward);
  register_above("aten::cumsum_", scan_in_place<at::cumsum>);
  register_above("aten::cumprod_", scan_in_place<at::cumprod>);
  register_decomposition("quantile", quantile<false>);
  register_decomposition("quantile.scalar", quantile_scalar<false>);
  register_decomposition("nanquantile", quantile<true>);
  register_decomposition("nanquantile.scalar", quantile_scalar<true>);
});

}  // namespace
}  // namespace tessera::detail::sort_and_scan_rules
