// Convolution, plain and transposed, of any kernel, stride, padding and dilation in any number of
// spatial dims: samples, input and output channels, groups of channels and spatial dims may be
// sharded, together too; weights replicated or sharded.

#include <ATen/ops/convolution.h>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/spatial/detail/convolution_halo.h"

namespace tessera::detail::convolution_rules {
namespace {

enum : int { kSample, kIn, kOut, kGroup, kSpatial };  // kSpatial + i: the i-th spatial dim

struct Convolution {
  explicit Convolution(const OpCall& call)
      : x(*call.find("input")),
        w(*call.find("weight")),
        transposed(call.boolean("transposed")),
        groups(call.integer("groups")) {
    const int n = w.spec.dims();
    if (x.spec.dims() != n)
      throw ShardingError("convolution of an input without samples, ", x.spec,
                          ", has no rule: unsqueeze it");
    if (n < 3)
      throw InvalidArgument("convolution with a weight of ", n, " dims: it needs at least 3");
    if (groups < 1) throw InvalidArgument("convolution of ", groups, " groups: at least 1");
    if (x.spec.shape()[1] != (transposed ? w.spec.shape()[0] : w.spec.shape()[1] * groups) ||
        w.spec.shape()[0] % groups != 0)
      throw InvalidArgument("convolution of an input of shape ", list(x.spec.shape()),
                            " with a weight of shape ", list(w.spec.shape()), " in ", groups,
                            " groups: the channels do not agree");
    if (transposed && w.spec.numel() == 0)
      throw InvalidArgument("transposed convolution with a weight of shape ", list(w.spec.shape()),
                            ", which has no elements");
    const auto spatial = static_cast<std::size_t>(n - 2);
    const Shape stride = per_dim(call.integers("stride"), spatial, "stride"),
                padding = per_dim(call.integers("padding"), spatial, "padding"),
                dilation = per_dim(call.integers("dilation"), spatial, "dilation"),
                extra = per_dim(call.integers("output_padding"), spatial, "output_padding");
    const bool grouped = groups > 1;
    input = output = weight = Labels(n, kUnsharded);
    input[0] = output[0] = kSample;
    input[1] = grouped ? kGroup : kIn;
    output[1] = grouped ? kGroup : kOut;
    // Weights are Cout x Cin / groups, transposed Cin x Cout / groups.
    weight[0] = grouped ? kGroup : transposed ? kIn : kOut;
    if (!grouped) weight[1] = transposed ? kOut : kIn;
    out_shape = {x.spec.shape()[0], transposed ? w.spec.shape()[1] * groups : w.spec.shape()[0]};
    for (std::size_t i = 0; i + 2 < static_cast<std::size_t>(n); ++i) {
      input[i + 2] = output[i + 2] = kSpatial + static_cast<int>(i);
      const Window window{w.spec.shape()[i + 2], stride[i], padding[i], dilation[i]};
      window.check();
      if (window.padding < 0)
        throw InvalidArgument("convolution with padding ", window.padding, " in dim ", i + 2,
                              ": at least 0");
      const std::int64_t size = x.spec.shape()[i + 2], more = extra[i];
      if (transposed && (more < 0 || more >= std::max(window.stride, window.dilation)))
        throw InvalidArgument("transposed convolution with output_padding ", more, " in dim ",
                              i + 2, ", stride ", window.stride, " and dilation ", window.dilation,
                              ": it must be at least 0 and less than one of these");
      windows.push_back(window);
      output_padding.push_back(more);
      out_shape.push_back(transposed ? (size - 1) * window.stride - 2 * window.padding +
                                           window.dilation * (window.kernel - 1) + more + 1
                                     : window.outputs(size, window.padding));
      // What plain libtorch refuses.
      if (out_shape.back() < 1 || size < 1)
        throw ShardingError("convolution of an input of shape ", list(x.spec.shape()),
                            " with a weight of shape ", list(w.spec.shape()),
                            ": the window does not fit in dim ", i + 2);
    }
  }

  // The partition of the channels if the axes of `spec` would divide groups: complete groups on
  // each rank.
  std::optional<Partition> group_parts(const OpCall& call, const std::vector<int>& axes) const {
    if (axes.empty()) return std::nullopt;
    int parts = 1;
    for (const int a : axes) parts *= context_of(x.spec)->sizes[a];
    const auto aligned = [&](const TensorInfo* t) -> std::optional<Partition> {
      if (!t) return std::nullopt;
      const DimSharding& d = t->spec.dim(t->argument == call.argument("weight") ? 0 : 1);
      if (d.axes != axes) return std::nullopt;
      const std::int64_t each = d.partition.extent() / groups;
      Shape sizes = d.partition.sizes();
      for (auto& n : sizes) {
        if (n % each != 0) return std::nullopt;
        n /= each;
      }
      return Partition(sizes);
    };
    for (const TensorInfo* t : {&x, call.find("grad_output"), &w})
      if (auto p = aligned(t)) return p;
    return Partition::even(groups, parts);
  }

  const TensorInfo &x, &w;
  bool transposed;
  std::int64_t groups;
  Labels input, weight, output;
  std::vector<Window> windows;
  Shape output_padding, out_shape;
};

bool even(const Partition& parts) {
  const Shape sizes = parts.sizes();
  const auto [least, most] = std::ranges::minmax(sizes);
  return most - least <= 1;
}

// The rows of a convolution's result. As a rule each goes to the rank that has the middle of its
// window. Causal layers pad on one side, before the convolution or in it with what is too much
// truncated behind it: there rows would move towards the first rank with each layer, so they stay
// where the window's last row is.
Partition result_rows(const Partition& in, const Window& w, std::int64_t rows) {
  const std::int64_t reach = (w.kernel - 1) * w.dilation;
  const auto anchored = [&](std::int64_t row) {
    Window moved = w;
    moved.padding += reach / 2 - row;
    return output_partition(in, moved, rows);
  };
  Partition middle = output_partition(in, w, rows);
  if (w.stride != 1 || reach == 0) return middle;
  if (w.padding == reach && rows == in.extent() + reach) return anchored(reach);
  if (w.padding > 0 || even(middle)) return middle;
  // Rows that were padded before: where the shards were even they say on which side.
  for (const std::int64_t row : {reach, std::int64_t{0}}) {
    const Partition other = anchored(row);
    if (even(other)) return other;
  }
  return middle;
}

// Partitions of spatial dims for the chosen placements of an input's and an output's spec: those of
// `own` if they are over the same axes, else derived from the other's by the windows.
struct Parts {
  std::vector<std::pair<int, Partition>> in, out;
};
Parts spatial_parts(const Convolution& c, const ShardSpec& in, const TensorInfo* gradient,
                    const Shape& out_shape) {
  Parts parts;
  for (std::size_t i = 0; i < c.windows.size(); ++i) {
    const int d = static_cast<int>(i) + 2;
    const auto& axes = in.dim(d).axes;
    if (axes.empty()) continue;
    const bool given = c.x.spec.dim(d).axes == axes;
    const Partition of_in = given ? c.x.spec.dim(d).partition : in.dim(d).partition;
    parts.in.emplace_back(d, of_in);
    if (gradient && gradient->spec.dim(d).axes == axes) {
      parts.out.emplace_back(d, gradient->spec.dim(d).partition);
    } else {
      parts.out.emplace_back(d, c.transposed
                                    ? transposed_output_partition(of_in, c.windows[i], out_shape[d])
                                    : result_rows(of_in, c.windows[i], out_shape[d]));
    }
  }
  return parts;
}

// Puts complete groups on each rank; returns the number that this rank has.
std::int64_t place_groups(const Convolution& c, const OpCall& call, Plan& plan,
                          const std::vector<std::pair<ShardSpec*, int>>& specs) {
  if (c.groups == 1) return 1;
  const ShardSpec& x = *plan.inputs[call.index_of(c.x)];
  const auto parts = c.group_parts(call, x.dim(1).axes);
  if (!parts) return c.groups;
  std::int64_t mine = 0;
  for (const auto& [spec, dim] : specs) {
    if (!*spec || !spec->is_sharded(dim)) continue;
    const std::int64_t each = spec->shape()[dim] / c.groups;
    *spec = with_parts(*spec, {{dim, scaled(*parts, each)}});
    mine = spec->local_shape()[dim] / each;
  }
  return mine;
}

void describe(const Convolution& c, LabelProblem& p) {
  for (const TensorInfo& t : p.call.tensors()) {
    const bool output = p.call.find("grad_output") == &t, bias = p.call.find("bias") == &t;
    p.inputs.push_back(&t == &c.x   ? c.input
                       : &t == &c.w ? c.weight
                       : output     ? c.output
                       : bias       ? Labels{c.output[1]}
                                    : Labels(t.spec.dims(), kUnsharded));
  }
}

Plan convolution(const OpCall& call) {
  const Convolution c(call);
  LabelProblem p(call);
  describe(c, p);
  p.outputs = {c.output};
  p.contract = {kIn};
  const TensorInfo* bias = call.find("bias");
  if (bias) p.additive = {call.index_of(*bias)};
  p.output_shapes = {c.out_shape};
  Plan plan = solve(p);
  ShardSpec &x = *plan.inputs[call.index_of(c.x)], &w = *plan.inputs[call.index_of(c.w)],
            &y = plan.outputs[0].spec;
  std::vector<std::pair<ShardSpec*, int>> grouped{{&x, 1}, {&w, 0}, {&y, 1}};
  if (bias) grouped.emplace_back(&*plan.inputs[call.index_of(*bias)], 0);
  const std::int64_t groups = place_groups(c, call, plan, grouped);
  const Parts parts = spatial_parts(c, x, nullptr, c.out_shape);
  x = with_parts(x, parts.in);
  y = with_parts(y, parts.out);
  // With one spatial dim libtorch copies the input first, so that the weight alone decides.
  const bool last = is_channels_last(c.w.spec.shape(), c.w.strides) ||
                    (c.windows.size() > 1 && is_channels_last(c.x.spec.shape(), c.x.strides));
  plan.outputs[0].strides = last ? channels_last(c.out_shape) : contiguous_strides(c.out_shape);
  if (any_distributed(x, 2) || groups != c.groups || x.local_numel() == 0 || w.local_numel() == 0) {
    auto halo = std::make_shared<ConvolutionHalo>(
        ConvolutionArguments{c.windows, c.output_padding, c.transposed, groups}, x, y, false);
    plan.local = [halo](const OperatorHandle&, Stack arguments) {
      return Stack{halo->forward(arguments[0].toTensor(), arguments[1].toTensor(),
                                 arguments[2].toOptional<at::Tensor>())};
    };
  }
  return plan;
}

Plan convolution_backward(const OpCall& call) {
  const Convolution c(call);
  const TensorInfo& g = *call.find("grad_output");
  LabelProblem p(call);
  describe(c, p);
  p.outputs = {c.input, c.weight, {c.output[1]}};
  p.output_shapes = {c.x.spec.shape(), c.w.spec.shape(), {g.spec.shape()[1]}};
  // grad_input sums over output channels, grad_weight over samples and space, grad_bias over both.
  // Each gradient is Partial over the labels that it does not have, except for grad_bias over input
  // channels, which every rank computes completely.
  p.contract = {kSample, kIn, kOut};
  for (std::size_t i = 0; i < c.windows.size(); ++i)
    p.contract.insert(kSpatial + static_cast<int>(i));
  Plan plan = solve(p);
  ShardSpec &x = *plan.inputs[call.index_of(c.x)], &w = *plan.inputs[call.index_of(c.w)],
            &y = *plan.inputs[call.index_of(g)];
  for (int axis = 0; axis < x.mesh_dims() && c.groups == 1; ++axis)
    if (x.placements()[axis].is_shard(1))
      plan.outputs[2].spec = plan.outputs[2].spec.with_placement(axis, Replicate());
  const std::int64_t groups = place_groups(c, call, plan,
                                           {{&x, 1},
                                            {&w, 0},
                                            {&y, 1},
                                            {&plan.outputs[0].spec, 1},
                                            {&plan.outputs[1].spec, 0},
                                            {&plan.outputs[2].spec, 0}});
  const Parts parts = spatial_parts(c, x, &g, g.spec.shape());
  x = with_parts(x, parts.in);
  plan.outputs[0].spec = with_parts(plan.outputs[0].spec, parts.in);
  y = with_parts(y, parts.out);
  plan.outputs[0].strides = c.x.strides;
  plan.outputs[1].strides = c.w.strides;
  if (any_distributed(x, 2) || groups != c.groups || x.local_numel() == 0 || w.local_numel() == 0 ||
      y.local_numel() == 0) {
    auto halo = std::make_shared<ConvolutionHalo>(
        ConvolutionArguments{c.windows, c.output_padding, c.transposed, groups}, x, y, true);
    const int masked = call.argument("output_mask");
    plan.local = [halo, masked](const OperatorHandle&, Stack arguments) {
      const auto mask = arguments[masked].toBoolList();
      auto all = halo->backward(arguments[0].toTensor(), arguments[1].toTensor(),
                                arguments[2].toTensor(), {mask[0], mask[1], mask[2]});
      return Stack{all[0], all[1], all[2]};
    };
  } else if (call.has("bias_sizes")) {
    plan.arguments = {
        {call.argument("bias_sizes"), c10::IValue(c10::List<std::int64_t>({y.local_shape()[1]}))}};
  }
  return plan;
}

// The operator that a traced module calls: the last four arguments choose among cuDNN's algorithms.
at::Tensor traced_convolution(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              bool transposed, c10::SymIntArrayRef output_padding,
                              c10::SymInt groups, bool, bool, bool, bool) {
  return at::convolution_symint(input, weight, bias, stride, padding, dilation, transposed,
                                output_padding, std::move(groups));
}

const AtStart registered([] {
  register_rule("aten::convolution", convolution);
  register_decomposition("_convolution", traced_convolution);
  register_rule("aten::convolution_backward", convolution_backward);
});

}  // namespace
}  // namespace tessera::detail::convolution_rules
