// Pooling: max, average, adaptive (and Lp, which libtorch composes of average), any kernel, stride,
// padding and ceil mode; all dims may be sharded. Indices are those of the global array.

#include <ATen/ops/max_pool1d_with_indices.h>

#include <limits>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/spatial/detail/pooling_halo.h"
#include "tessera/partition/internal/window_call.h"

namespace tessera::detail::pooling_rules {
namespace {

// One call: the specs of input and output, and the windows.
struct Pooling {
  Pooling(const OpCall& call, int inner) : x(without_partial(call.find("self")->spec)) {
    const int n = x.dims(), lead = n - inner;
    if (lead < 1 || lead > 2)
      throw ShardingError(call.name(), " of ", call.find("self")->spec, ": it needs ", inner + 1,
                          " or ", inner + 2, " dims");
    Shape shape = x.shape();
    std::vector<std::pair<int, Partition>> parts;
    const bool adaptive = call.argument("kernel_size") < 0;
    Shape kernel, stride, padding, dilation(inner, 1), sizes;
    bool ceil = false;
    if (!adaptive) {
      kernel = per_dim(call.integers("kernel_size"), inner, "kernel_size");
      stride = call.integers("stride");
      stride = stride.empty() ? kernel : per_dim(stride, inner, "stride");
      padding = per_dim(call.integers("padding"), inner, "padding");
      if (call.has("dilation")) dilation = per_dim(call.integers("dilation"), inner, "dilation");
      ceil = call.boolean("ceil_mode");
    } else if (call.argument("output_size") >= 0) {
      sizes = per_dim(call.integers("output_size"), inner, "output_size");
    } else {  // a backward: as for its gradient
      const Shape& g = call.find("grad_output")->spec.shape();
      sizes.assign(g.end() - inner, g.end());
    }
    for (const Shape* all : {&kernel, &stride, &padding, &dilation, &sizes}) {
      for (const std::int64_t size : *all) {
        if (size > std::numeric_limits<std::int32_t>::max())
          throw InvalidArgument(call.name(), ": ", size, " is too large for a window");
      }
    }
    for (int i = 0; i < inner; ++i) {
      const int d = lead + i;
      PoolDim dim{shape[d], 0, {}, adaptive};
      if (adaptive) {
        dim.outputs = sizes[i];
      } else {
        dim.window = {kernel[i], stride[i], padding[i], dilation[i]};
        dim.window.check();
        // The last window of ceil mode must start inside the array or its padding in front.
        const std::int64_t room = dim.extent + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1 +
                                  (ceil ? stride[i] - 1 : 0);
        dim.outputs = room < 0 ? 0 : room / stride[i] + 1;
        if (ceil && (dim.outputs - 1) * stride[i] >= dim.extent + padding[i]) --dim.outputs;
        if (2 * padding[i] > dilation[i] * (kernel[i] - 1) + 1 || padding[i] < 0)
          throw ShardingError(call.name(), ": padding ", padding[i],
                              " is more than half of the window of kernel ", kernel[i]);
      }
      if (dim.outputs < (adaptive ? 0 : 1) || dim.extent < 1)
        throw ShardingError(call.name(), " of an input of shape ", list(shape),
                            ": no window fits in dim ", d);
      shape[d] = dim.outputs;
      if (x.is_sharded(d)) parts.emplace_back(d, outputs_of(x.dim(d).partition, dim));
      dims.push_back(dim);
    }
    y = mapped_spec(x, shape, all_labels(n), false, parts);
    sharded = any_distributed(x, lead) || x.local_numel() == 0;
  }

  // True where libtorch's kernel on the shard alone is not enough: windows reach over shards, the
  // shard has no elements, or an adaptive pooling is to size 0.
  bool needs_halo() const { return sharded || y.numel() == 0; }

  static Partition outputs_of(const Partition& inputs, const PoolDim& dim) {
    if (!dim.adaptive) return output_partition(inputs, dim.window, dim.outputs);
    Shape sizes(inputs.parts(), 0);
    for (std::int64_t o = 0; o < dim.outputs; ++o) {
      const Interval in = dim.inside(o);
      ++sizes[inputs.owner((in.begin + in.end - 1) / 2)];
    }
    return Partition(sizes);
  }

  std::shared_ptr<PoolHalo> halo() const { return std::make_shared<PoolHalo>(x, y, dims); }

  ShardSpec x, y;
  std::vector<PoolDim> dims;
  bool sharded;
};

template <int inner>
Plan largest(const OpCall& call) {
  const Pooling p(call, inner);
  Plan plan{.inputs = {p.x}, .outputs = {{p.y}, {p.y}}};
  if (p.needs_halo())
    plan.local = [halo = p.halo()](const OperatorHandle&, Stack arguments) {
      auto [y, indices] = halo->largest(arguments[0].toTensor());
      return Stack{y, indices};
    };
  return plan;
}

// Inputs of a backward: tensors of the output's shape have the output's spec, the input its own.
Plan backward_plan(const OpCall& call, const Pooling& p) {
  Plan plan{.outputs = {{p.x, call.find("self")->strides}}};
  for (const TensorInfo& t : call.tensors())
    plan.inputs.push_back(call.find("self") == &t ? p.x : p.y);
  return plan;
}

template <int inner>
Plan largest_backward(const OpCall& call) {
  const Pooling p(call, inner);
  Plan plan = backward_plan(call, p);
  if (p.sharded)
    plan.local = [halo = p.halo(), indices = call.argument("indices")](const OperatorHandle&,
                                                                       Stack arguments) {
      return Stack{halo->largest_backward(arguments[0].toTensor(), arguments[indices].toTensor(),
                                          arguments[1].toTensor())};
    };
  return plan;
}

struct Divisor {
  explicit Divisor(const OpCall& call)
      : count_padding(call.has("count_include_pad") && call.boolean("count_include_pad")),
        fixed(call.has("divisor_override") ? call.integer("divisor_override") : 0) {}
  bool count_padding;
  std::int64_t fixed;
};

template <int inner>
Plan average(const OpCall& call) {
  const Pooling p(call, inner);
  const Divisor by(call);
  Plan plan{.inputs = {p.x}, .outputs = {{p.y}}};
  if (p.needs_halo())
    plan.local = [halo = p.halo(), by](const OperatorHandle&, Stack arguments) {
      return Stack{halo->average(arguments[0].toTensor(), by.count_padding, by.fixed)};
    };
  return plan;
}

template <int inner>
Plan average_backward(const OpCall& call) {
  const Pooling p(call, inner);
  const Divisor by(call);
  Plan plan = backward_plan(call, p);
  if (p.sharded)
    plan.local = [halo = p.halo(), by](const OperatorHandle&, Stack arguments) {
      return Stack{halo->average_backward(arguments[0].toTensor(), arguments[1].toTensor(),
                                          by.count_padding, by.fixed)};
    };
  return plan;
}

template <int inner>
void register_all() {
  const std::string dims = concat(inner, "d");
  register_rule("aten::max_pool" + dims + "_with_indices", largest<inner>);
  register_rule("aten::max_pool" + dims + "_with_indices_backward", largest_backward<inner>);
  register_rule("aten::adaptive_max_pool" + dims, largest<inner>);
  register_rule("aten::adaptive_max_pool" + dims + "_backward", largest_backward<inner>);
  register_rule("aten::avg_pool" + dims, average<inner>);
  register_rule("aten::avg_pool" + dims + "_backward", average_backward<inner>);
  register_rule("aten::_adaptive_avg_pool" + dims, average<inner>);
  register_rule("aten::_adaptive_avg_pool" + dims + "_backward", average_backward<inner>);
}

// Where no gradient is asked for, libtorch's own reads memory that a sharded tensor has not.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil) {
  if (!at::isFloatingType(self.scalar_type()))
    throw InvalidArgument("max_pool1d of ", c10::toString(self.scalar_type()),
                          " values: give floating-point ones");
  return std::get<0>(at::max_pool1d_with_indices(self, kernel, stride, padding, dilation, ceil));
}

const AtStart registered([] {
  register_all<2>();
  register_all<3>();
  register_decomposition("max_pool1d", max_pool1d);
  // The windows of each sample are drawn separately, so samples may be sharded.
  register_rules({"aten::fractional_max_pool2d", "aten::fractional_max_pool3d",
                  "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward"},
                 guarded(per_sample));
});

}  // namespace
}  // namespace tessera::detail::pooling_rules
