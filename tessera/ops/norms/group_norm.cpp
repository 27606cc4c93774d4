// Group norm: any dims may be sharded. If channels or space are, mean and variance of a group are
// combined from those of its shards, by two all-reduces of one number per sample and group in
// forward and one of two in backward; the field is not moved.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include "tessera/ops/norms/detail/dtypes.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::group_norm_rules {
namespace {

// One call: samples x channels x space, and the labels of its tensors.
struct Groups {
  Groups(const OpCall& call, const TensorInfo& input)
      : x(input), n(x.spec.dims()), count(call.integer("group")) {
    if (n < 2 || count < 1 || x.spec.shape()[1] % count != 0)
      throw InvalidArgument(call.name(), " of an input of shape ", list(x.spec.shape()), " in ",
                            count, " groups: the channels do not divide into them");
    const Shape& sizes = x.spec.shape();
    if (call.argument("N") >= 0 &&
        (call.integer("N") != sizes[0] || call.integer("C") != sizes[1] ||
         call.integer("HxW") != c10::multiply_integers(sizes.begin() + 2, sizes.end())))
      throw InvalidArgument(call.name(), " of an input of shape ", list(x.spec.shape()),
                            ": N, C and HxW are not its sizes");
    for (int d = 1; d < n; ++d) sharded |= x.spec.is_sharded(d);
    data = sharded ? all_labels(n) : first_dims_free(n, 1);
    channels = {sharded ? 1 : kUnsharded};
    statistics = {x.spec.shape()[0], count};
  }

  const TensorInfo& x;
  int n;
  std::int64_t count;
  bool sharded = false;
  Labels data, channels;
  Shape statistics;
};

// This rank's part: sums over its share of each group, and what is one per group as one per
// element.
struct Part {
  Part(const ShardSpec& x, std::int64_t groups_, const OverRanks& total_)
      : total(total_), groups(groups_), local(x.local_shape()), first(x.local_offset()[1]) {
    each = x.shape()[1] / groups;
    elements = static_cast<double>(each);
    for (int d = 2; d < x.dims(); ++d) {
      elements *= static_cast<double>(x.shape()[d]);
      space.push_back(d);
      here *= static_cast<double>(local[d]);
    }
  }

  at::Tensor group_of_channel(const at::Tensor& like) const {
    return at::arange(first, first + local[1], like.options().dtype(at::kLong)).floor_divide(each);
  }
  /// [samples, channels] -> [samples, groups], over all ranks.
  at::Tensor over_groups(const at::Tensor& of_channels) const {
    const at::Tensor sums = at::zeros({local[0], groups}, of_channels.options());
    return total(sums.index_add(1, group_of_channel(of_channels), of_channels));
  }
  /// Sums over space: [samples, channels].
  at::Tensor over_space(const at::Tensor& t) const { return space.empty() ? t : at::sum(t, space); }
  /// [samples, groups] -> [samples, channels].
  at::Tensor of_channels(const at::Tensor& of_groups) const {
    return of_groups.index_select(1, group_of_channel(of_groups));
  }
  /// [samples, channels] or [channels] -> broadcasts with the field.
  at::Tensor as_field(const at::Tensor& t) const {
    Shape shape(local.size(), 1);
    if (t.dim() == 2) shape[0] = t.size(0);
    shape[1] = t.size(-1);
    return t.reshape(shape);
  }
  at::Tensor per_element(const at::Tensor& of_groups) const {
    return as_field(of_channels(of_groups));
  }

  OverRanks total;
  std::int64_t groups;
  Shape local, space;
  std::int64_t first, each;
  /// Number of elements of a group; and of one channel on this rank.
  double elements, here = 1;
};

void take_local_counts(const OpCall& call, Plan& plan, const ShardSpec& x) {
  plan.arguments = {{call.argument("N"), x.local_shape()[0]}};
}

Plan group_norm(const OpCall& call) {
  const Groups g(call, call.tensor(0));
  require_norm_dtypes(call, g.x);
  LabelProblem p(call);
  label_arguments(p, {{"input", g.data}, {"weight", g.channels}, {"bias", g.channels}});
  const Labels samples = first_dims_free(2, 1);
  p.outputs = {g.data, samples, samples};
  p.output_shapes = {g.x.spec.shape(), g.statistics, g.statistics};
  if (g.sharded)
    for (int d = 1; d < g.n; ++d) p.contract.insert(d);
  Plan plan = solve(p);
  const ShardSpec& in = *plan.inputs[0];
  const std::vector<int> axes = axes_within(in, 1);
  if (axes.empty()) {
    take_local_counts(call, plan, in);
    // Statistics of no sample have the dtype of the other ranks': backward is given them.
    if (in.local_numel() == 0 && in.numel() > 0)
      plan.local = [local = in.local_shape(), of = plan.outputs[1].spec.local_shape()](
                       const c10::OperatorHandle&, torch::jit::Stack a) {
        const at::Tensor x = a[0].toTensor();
        const auto statistics = at::empty(
            of,
            x.options().dtype(statistics_dtype(x, {optional_tensor(a[1]), optional_tensor(a[2])})));
        return torch::jit::Stack{at::empty(local, x.options()), statistics, statistics.clone()};
      };
    return plan;
  }
  reduce_inside(plan.outputs[1]);
  reduce_inside(plan.outputs[2]);
  plan.local = [part = Part(in, g.count, OverRanks{context_of(in), axes, "statistics"})](
                   const OperatorHandle&, Stack a) {
    const at::Tensor x = a[0].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor wide = x.to(type);
    // For each channel on this rank count, mean and squares around it, combined by groups.
    at::Tensor mean_here = at::zeros({part.local[0], part.local[1]}, wide.options()),
               squares_here = mean_here;
    if (part.space.empty()) {
      mean_here = wide;
    } else if (part.here > 0) {
      const auto [v, m] =
          at::var_mean(wide, at::OptionalIntArrayRef(part.space), at::Scalar(0), false);
      mean_here = m;
      squares_here = v * part.here;
    }
    const at::Tensor mean = part.over_groups(mean_here * (part.here / part.elements));
    const at::Tensor off = mean_here - part.of_channels(mean);
    const at::Tensor var = part.over_groups((squares_here + off * off * part.here) / part.elements);
    const at::Tensor rstd = at::rsqrt(var + a[7].toDouble());
    at::Tensor y = (wide - part.per_element(mean)) * part.per_element(rstd);
    if (const at::Tensor w = given(a[1], type); w.defined()) y = y * part.as_field(w);
    if (const at::Tensor b = given(a[2], type); b.defined()) y = y + part.as_field(b);
    const auto returned = statistics_dtype(x, {optional_tensor(a[1]), optional_tensor(a[2])});
    return Stack{y.to(x.scalar_type()), mean.to(returned), rstd.to(returned)};
  };
  return plan;
}

// With x^ the normalized input and g = dy w: dx = rstd (g - mean(g) - x^ mean(g x^)), means over a
// group; dw = sum(dy x^) and db = sum(dy) over samples and space.
Plan group_norm_backward(const OpCall& call) {
  const Groups g(call, *call.find("input"));
  LabelProblem p(call);
  const Labels samples = first_dims_free(2, 1);
  label_arguments(p, {{"grad_out", g.data},
                      {"input", g.data},
                      {"mean", samples},
                      {"rstd", samples},
                      {"weight", g.channels}});
  const Shape of_channels{g.x.spec.shape()[1]};
  p.outputs = {g.data, g.channels, g.channels};
  p.output_shapes = {g.x.spec.shape(), of_channels, of_channels};
  p.contract = {0};
  if (g.sharded)
    for (int d = 2; d < g.n; ++d) p.contract.insert(d);
  Plan plan = solve(p);
  const ShardSpec& in = *plan.inputs[call.index_of(g.x)];
  const std::vector<int> axes = axes_within(in, 1);
  if (axes.empty()) {
    take_local_counts(call, plan, in);
    return plan;
  }
  plan.local = [part = Part(in, g.count, OverRanks{context_of(in), axes, "statistics"})](
                   const OperatorHandle&, Stack a) {
    const at::Tensor x = a[1].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor dy = a[0].toTensor().to(type),
                     rstd = part.per_element(a[3].toTensor().to(type)),
                     normal = (x.to(type) - part.per_element(a[2].toTensor().to(type))) * rstd;
    const at::Tensor bias = part.over_space(dy), weight = part.over_space(dy * normal);
    const at::Tensor w = given(a[4], type);
    // One all-reduce for both sums: they are concatenated along samples.
    const at::Tensor both =
        at::stack({bias, weight}) * (w.defined() ? w : at::ones({1}, dy.options()));
    const at::Tensor flat = both.flatten(0, 1);
    at::Tensor sums = at::zeros({flat.size(0), part.groups}, flat.options());
    sums = part.total(sums.index_add(1, part.group_of_channel(flat), flat));
    sums = sums.view({2, part.local[0], part.groups}) / part.elements;
    const at::Tensor scaled = w.defined() ? dy * part.as_field(w) : dy;
    const at::Tensor dx =
        (scaled - part.per_element(sums[0]) - normal * part.per_element(sums[1])) * rstd;
    const auto mask = a[9].toBoolList();
    const auto of_weight = w.defined() ? a[4].toTensor().scalar_type() : x.scalar_type();
    const Shape over_samples{0};
    return Stack{mask[0] ? dx.to(x.scalar_type()) : at::Tensor(),
                 mask[1] ? weight.sum(over_samples).to(of_weight) : at::Tensor(),
                 mask[2] ? bias.sum(over_samples).to(of_weight) : at::Tensor()};
  };
  return plan;
}

// Kernels that refuse empty shards are not called on one; statistics over ranks are computed on all
// ranks.
Rule guarded_where_local(Rule rule) {
  return [rule, guard = guarded(rule)](const OpCall& call) {
    Plan plan = rule(call);
    return plan.local ? plan : guard(call);
  };
}

const AtStart registered([] {
  register_rule("aten::native_group_norm", guarded_where_local(group_norm));
  register_rule("aten::native_group_norm_backward", guarded_where_local(group_norm_backward));
});

}  // namespace
}  // namespace tessera::detail::group_norm_rules
