// Layer norm: any dims may be sharded. If the normalized ones are, mean and variance of a row are
// combined from those of its shards, by two all-reduces of one number per row in forward and one of
// two in backward; the field is not moved.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/norm_except_dim.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "tessera/ops/norms/detail/dtypes.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::layer_norm_rules {
namespace {

// Which dims are normalized, how many elements a row has, and how rows are sharded.
struct Rows {
  Rows(const OpCall& call, const TensorInfo& input)
      : x(input), normalized(call.integers("normalized_shape")) {
    n = x.spec.dims();
    free = n - static_cast<int>(normalized.size());
    if (free < 0 || normalized.empty() ||
        !std::equal(normalized.begin(), normalized.end(), x.spec.shape().begin() + free))
      throw InvalidArgument(call.name(), " over dims of sizes ", list(normalized),
                            " of an input of shape ", list(x.spec.shape()),
                            ": they must be its last dims");
    for (int d = free; d < n; ++d) {
      dims.push_back(d);
      inner.push_back(d);
      count *= static_cast<double>(x.spec.shape()[d]);
      sharded |= x.spec.is_sharded(d);
    }
    // If no row is divided among ranks, a weight that is sharded is gathered rather than dividing
    // the rows.
    data = sharded ? all_labels(n) : first_dims_free(n, free);
    if (!sharded) inner.assign(inner.size(), kUnsharded);
    statistics = x.spec.shape();
    std::fill(statistics.begin() + free, statistics.end(), 1);
  }

  const TensorInfo& x;
  Shape normalized, statistics, dims;
  Labels data, inner;  // of tensors with the input's shape; of weight and bias
  int n, free;
  bool sharded = false;
  double count = 1;
};

Plan layer_norm(const OpCall& call) {
  const Rows r(call, call.tensor(0));
  require_norm_dtypes(call, r.x);
  const Labels rows = first_dims_free(r.n, r.free);
  LabelProblem p(call, {}, {r.data, rows, rows}, {r.x.spec.shape(), r.statistics, r.statistics});
  label_arguments(p, {{"input", r.data}, {"weight", r.inner}, {"bias", r.inner}});
  if (r.sharded) p.contract.insert(r.inner.begin(), r.inner.end());
  Plan plan = solve(p);
  // in the dtype that the kernel returns
  if (const auto* known = call.outputs(); known && known->size() == 3)
    for (std::size_t o = 0; o < 3; ++o) plan.outputs[o].strides = (*known)[o].strides;
  reduce_inside(plan.outputs[1]);
  reduce_inside(plan.outputs[2]);
  const std::vector<int> axes = axes_within(*plan.inputs[0], r.free);
  const Shape local = plan.inputs[0]->local_shape();
  const bool empty = plan.inputs[0]->local_numel() == 0;
  if (axes.empty()) {
    // Kernels disagree on the shape of the statistics of an empty input.
    if (empty) plan.local = zeros_of(plan, wide_statistics_dtype);
    return plan;
  }
  double here = 1;
  for (const auto d : r.dims) here *= static_cast<double>(local[d]);
  plan.local = [total = OverRanks{context_of(r.x.spec), axes, "statistics"}, dims = r.dims, here,
                count = r.count, rows = plan.outputs[1].spec.local_shape(),
                empty](const OperatorHandle&, Stack a) {
    const at::Tensor x = a[0].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor wide = x.to(type);
    at::Tensor part_mean = at::zeros(rows, wide.options()), part_squares = part_mean;
    if (!empty) {
      const auto [v, m] = at::var_mean(wide, at::OptionalIntArrayRef(dims), at::Scalar(0), true);
      part_mean = m;
      part_squares = v * here;
    }
    const at::Tensor mean = total(part_mean * (here / count));
    const at::Tensor off = part_mean - mean;
    const at::Tensor rstd =
        at::rsqrt(total(part_squares + off * off * here) / count + a[4].toDouble());
    at::Tensor y = (wide - mean) * rstd;
    if (const at::Tensor w = given(a[2], type); w.defined()) y = y * w;
    if (const at::Tensor b = given(a[3], type); b.defined()) y = y + b;
    const auto returned = wide_statistics_dtype(a);
    return Stack{y.to(x.scalar_type()), mean.to(returned), rstd.to(returned)};
  };
  return plan;
}

// With x^ the normalized input and g = dy w: dx = rstd (g - mean(g) - x^ mean(g x^)), dw = sum(dy
// x^) and db = sum(dy) over rows.
Plan layer_norm_backward(const OpCall& call) {
  const Rows r(call, *call.find("input"));
  const Labels rows = first_dims_free(r.n, r.free);
  LabelProblem p(call, {}, {r.data, r.inner, r.inner},
                 {r.x.spec.shape(), r.normalized, r.normalized});
  label_arguments(p, {{"grad_out", r.data},
                      {"input", r.data},
                      {"mean", rows},
                      {"rstd", rows},
                      {"weight", r.inner},
                      {"bias", r.inner}});
  p.contract = first_dims(r.free);
  Plan plan = solve(p);
  plan.outputs[0].strides = contiguous_strides(r.x.spec.shape());
  const ShardSpec& in = *plan.inputs[call.index_of(r.x)];
  const std::vector<int> axes = axes_within(in, r.free);
  const bool empty = in.local_numel() == 0;
  const Shape inner = plan.outputs[1].spec.local_shape();
  if (axes.empty()) {
    if (empty)
      plan.local = [local = in.local_shape(), inner](const OperatorHandle&, Stack a) {
        const at::Tensor& t = a[1].toTensor();
        return Stack{t.new_empty(local), t.new_zeros(inner), t.new_zeros(inner)};
      };
    return plan;
  }
  plan.local = [total = OverRanks{context_of(r.x.spec), axes, "statistics"}, dims = r.dims,
                free = r.free, count = r.count, inner](const OperatorHandle&, Stack a) {
    const at::Tensor x = a[1].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor dy = a[0].toTensor().to(type), rstd = a[4].toTensor().to(type),
                     normal = (x.to(type) - a[3].toTensor().to(type)) * rstd,
                     weight = given(a[5], type), g = weight.defined() ? dy * weight : dy;
    const at::Tensor sums =
        total(at::stack({at::sum(g, dims, true), at::sum(g * normal, dims, true)})) / count;
    const at::Tensor dx = (g - sums[0] - normal * sums[1]) * rstd;
    const Shape rows = numbers_below<std::int64_t>(free);
    const auto of_weight = weight.defined() ? a[5].toTensor().scalar_type() : x.scalar_type();
    const auto over_rows = [&](const at::Tensor& t) {
      return (free == 0 ? t : at::sum(t, rows)).view(inner).to(of_weight);
    };
    const auto mask = a[7].toBoolList();
    return Stack{dx.to(x.scalar_type()), mask[1] ? over_rows(dy * normal) : at::Tensor(),
                 mask[2] ? over_rows(dy) : at::Tensor()};
  };
  return plan;
}

// The direction of a weight and its length, apart (Salimans and Kingma, 2016).
std::tuple<at::Tensor, at::Tensor> weight_norm(const at::Tensor& v, const at::Tensor& g,
                                               std::int64_t dim) {
  const at::Tensor norm = at::norm_except_dim(v, 2, dim);
  return {v * (g / norm), norm};
}

const AtStart registered([] {
  register_decomposition("_weight_norm_interface", weight_norm);
  register_rule("aten::native_layer_norm", layer_norm);
  register_rule("aten::native_layer_norm_backward", layer_norm_backward);
});

}  // namespace
}  // namespace tessera::detail::layer_norm_rules
