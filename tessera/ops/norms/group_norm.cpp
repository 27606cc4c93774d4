// Group norm: any dims may be sharded. If channels or space are, mean and variance of a group are
// combined from those of its shards, by two all-reduces of one number per sample and group in
// forward and one of two in backward; the field is not moved.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
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

// This rank's shares of groups, its cells: [samples, cells, channels of one, space]. On a rank that
// has all channels a cell has those of a group; else each channel is a cell.
struct Part {
  Part(const ShardSpec& x, std::int64_t groups_, const OverRanks& total_)
      : total(total_),
        groups(groups_),
        local(x.local_shape()),
        first(x.local_offset()[1]),
        each(x.shape()[1] / groups),
        whole(local[1] == x.shape()[1]) {
    elements = static_cast<double>(each);
    here = static_cast<double>(channels());
    inner.push_back(2);
    for (int d = 2; d < x.dims(); ++d) {
      elements *= static_cast<double>(x.shape()[d]);
      here *= static_cast<double>(local[d]);
      inner.push_back(d + 1);
    }
  }

  std::int64_t cells() const { return whole ? groups : local[1]; }
  std::int64_t channels() const { return whole ? each : 1; }
  at::Tensor as_cells(const at::Tensor& field) const {
    return field.unflatten(1, {cells(), channels()});
  }
  /// Undefined where cells are groups.
  at::Tensor group_of_cell(const at::Tensor& like) const {
    if (whole) return {};
    return at::arange(first, first + local[1], like.options().dtype(at::kLong)).floor_divide(each);
  }
  /// [..., cells] -> [..., groups], over all ranks; may change what it is given.
  at::Tensor over_groups(const at::Tensor& of_cells, const at::Tensor& group) const {
    if (whole) return total(of_cells);
    Shape shape = of_cells.sizes().vec();
    shape.back() = groups;
    return total(at::zeros(shape, of_cells.options()).index_add_(-1, group, of_cells));
  }
  /// [..., groups] -> [..., cells].
  at::Tensor of_cells(const at::Tensor& of_groups, const at::Tensor& group) const {
    return whole ? of_groups : of_groups.index_select(-1, group);
  }
  /// [samples, cells] or [channels] -> broadcasts with cells of the field.
  at::Tensor as_field(const at::Tensor& t) const {
    Shape shape(local.size() + 1, 1);
    shape[1] = cells();
    shape[t.dim() == 2 ? 0 : 2] = t.dim() == 2 ? t.size(0) : channels();
    return t.reshape(shape);
  }
  /// Sums over space: [samples, cells, channels].
  at::Tensor over_space(const at::Tensor& t) const {
    return inner.size() == 1 ? t : at::sum(t, at::IntArrayRef(inner).slice(1));
  }

  OverRanks total;
  std::int64_t groups;
  Shape local, inner;
  std::int64_t first, each;
  bool whole;
  /// Number of elements of a group; and of one cell on this rank.
  double elements, here;
};

Plan group_norm(const OpCall& call) {
  const Groups g(call, call.tensor(0));
  require_norm_dtypes(call, g.x);
  const Labels samples = first_dims_free(2, 1);
  LabelProblem p(call, {}, {g.data, samples, samples},
                 {g.x.spec.shape(), g.statistics, g.statistics});
  label_arguments(p, {{"input", g.data}, {"weight", g.channels}, {"bias", g.channels}});
  if (g.sharded)
    for (int d = 1; d < g.n; ++d) p.contract.insert(d);
  Plan plan = solve(p);
  const ShardSpec& in = *plan.inputs[0];
  const std::vector<int> axes = axes_within(in, 1);
  if (axes.empty()) {
    plan.arguments = {{call.argument("N"), in.local_shape()[0]}};
    // Statistics of no sample have the dtype of the other ranks': backward is given them.
    if (in.local_numel() == 0 && in.numel() > 0) plan.local = zeros_of(plan, statistics_dtype);
    return plan;
  }
  reduce_inside(plan.outputs[1]);
  reduce_inside(plan.outputs[2]);
  plan.local = [part = Part(in, g.count, OverRanks{context_of(in), axes, "statistics"})](
                   const OperatorHandle&, Stack a) {
    const at::Tensor x = a[0].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor field = part.as_cells(x.to(type)), group = part.group_of_cell(field);
    // For each cell mean and variance, combined by groups.
    at::Tensor mean_here, var_here;
    if (part.here > 0)
      std::tie(var_here, mean_here) =
          at::var_mean(field, at::OptionalIntArrayRef(part.inner), at::Scalar(0), false);
    else
      mean_here = var_here = at::zeros({part.local[0], part.cells()}, field.options());
    const double share = part.here / part.elements;
    const at::Tensor mean = part.over_groups(mean_here * share, group),
                     of_cells = part.of_cells(mean, group), off = mean_here - of_cells;
    const at::Tensor var = part.over_groups(at::addcmul(var_here, off, off).mul_(share), group);
    const at::Tensor rstd = at::rsqrt(var + a[7].toDouble());
    at::Tensor y =
        (field - part.as_field(of_cells)).mul_(part.as_field(part.of_cells(rstd, group)));
    at::Tensor w = given(a[1], type), b = given(a[2], type);
    if (w.defined()) w = part.as_field(w);
    if (b.defined()) b = part.as_field(b);
    if (w.defined() && b.defined())
      y = at::addcmul(b, y, w);
    else if (w.defined() || b.defined())
      y = w.defined() ? y.mul_(w) : y.add_(b);
    const auto returned = statistics_dtype(a);
    return Stack{y.flatten(1, 2).to(x.scalar_type()), mean.to(returned), rstd.to(returned)};
  };
  return plan;
}

// With x^ the normalized input and g = dy w: dx = rstd (g - mean(g) - x^ mean(g x^)), means over a
// group; dw = sum(dy x^) and db = sum(dy) over samples and space.
Plan group_norm_backward(const OpCall& call) {
  const Groups g(call, *call.find("input"));
  const Labels samples = first_dims_free(2, 1);
  const Shape of_channels{g.x.spec.shape()[1]};
  LabelProblem p(call, {}, {g.data, g.channels, g.channels},
                 {g.x.spec.shape(), of_channels, of_channels});
  label_arguments(p, {{"grad_out", g.data},
                      {"input", g.data},
                      {"mean", samples},
                      {"rstd", samples},
                      {"weight", g.channels}});
  p.contract = {0};
  if (g.sharded)
    for (int d = 2; d < g.n; ++d) p.contract.insert(d);
  Plan plan = solve(p);
  const ShardSpec& in = *plan.inputs[call.index_of(g.x)];
  const std::vector<int> axes = axes_within(in, 1);
  if (axes.empty()) {
    plan.arguments = {{call.argument("N"), in.local_shape()[0]}};
    return plan;
  }
  plan.local = [part = Part(in, g.count, OverRanks{context_of(in), axes, "statistics"})](
                   const OperatorHandle&, Stack a) {
    const at::Tensor x = a[1].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor dy = part.as_cells(a[0].toTensor().to(type)), group = part.group_of_cell(dy);
    const auto of_statistic = [&](const c10::IValue& v) {
      return part.as_field(part.of_cells(v.toTensor().to(type), group));
    };
    const at::Tensor rstd = of_statistic(a[3]),
                     normal = (part.as_cells(x.to(type)) - of_statistic(a[2])).mul_(rstd);
    const at::Tensor bias = part.over_space(dy), weight = part.over_space(dy * normal);
    const at::Tensor w = given(a[4], type);
    // One all-reduce for both sums.
    at::Tensor both = at::stack({bias, weight});
    if (w.defined()) both.mul_(w.reshape({part.cells(), part.channels()}));
    both = part.over_groups(part.whole ? both.sum(-1) : both.flatten(2), group);
    both = part.of_cells(both.div_(part.elements), group);
    const auto mask = a[9].toBoolList();
    at::Tensor dx;
    if (mask[0])
      dx = ((w.defined() ? dy * part.as_field(w) : dy) - part.as_field(both[0]))
               .addcmul_(normal, part.as_field(both[1]), -1)
               .mul_(rstd)
               .flatten(1, 2)
               .to(x.scalar_type());
    const auto of_weight = w.defined() ? a[4].toTensor().scalar_type() : x.scalar_type();
    const auto over_samples = [&](const at::Tensor& t) {
      return t.sum(Shape{0}).flatten().to(of_weight);
    };
    return Stack{dx, mask[1] ? over_samples(weight) : at::Tensor(),
                 mask[2] ? over_samples(bias) : at::Tensor()};
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
