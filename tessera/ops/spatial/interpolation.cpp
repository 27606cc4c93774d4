// Interpolation (upsample_*, which torch::nn::functional::interpolate and torch::nn::Upsample call)
// of fields whose dims may all be sharded. libtorch's backward gets sizes but no sharding, so these
// functions run above autograd.

#include <ATen/ops/empty.h>

#include <bit>
#include <functional>

#include "tessera/ops/rules/detail/field_map.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/spatial/detail/interpolation_halo.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::interpolation_rules {
namespace {

/// The operator's gradient has matrices of its own for nearest neighbours.
std::shared_ptr<const FieldMap> resampling(const at::Tensor& field, const InterpolationCall& call) {
  const ShardSpec x = without_partial(spec(field)), y = resampled_spec(x, call.outputs);
  const int lead = x.dims() - call.op->inner;
  const std::vector<std::int64_t> inputs(x.shape().begin() + lead, x.shape().end());
  const auto there = interpolation_matrices(call, inputs, false);
  const auto back = call.op->nearest && at::isFloatingType(field.scalar_type())
                        ? interpolation_matrices(call, inputs, true)
                        : there;
  const auto forward = std::make_shared<InterpolationHalo>(call, x, y, there, true);
  const auto backward =
      back == there ? forward : std::make_shared<InterpolationHalo>(call, x, y, back, false);
  return std::make_shared<FieldMap>(
      FieldMap{x, y, suggested_strides(field, x.shape()), suggested_strides(field, y.shape()),
               [forward](const at::Tensor& local) { return forward->forward(local); },
               [backward](const at::Tensor& local) { return backward->adjoint(local); }});
}

std::shared_ptr<const FieldMap> cached(const at::Tensor& field, const InterpolationCall& call) {
  Key key;
  const auto number = [&](auto n) { key.push_back(static_cast<std::uint64_t>(n)); };
  const LayoutPtr layout = meta_of(field)->layout;
  number(reinterpret_cast<std::uintptr_t>(layout.get()));  // interned; held with the map
  number(reinterpret_cast<std::uintptr_t>(call.op));
  number(call.align);
  for (const auto n : call.outputs) number(n);
  for (const auto& s : call.scales) {
    number(s.has_value());
    number(std::bit_cast<std::uint64_t>(s.value_or(0)));
  }
  using Held = std::pair<LayoutPtr, std::shared_ptr<const FieldMap>>;
  return ThreadCache<Held, struct ByLayoutAndCall>::find_or_make(
             std::move(key), [&] { return Held(layout, resampling(field, call)); })
      .second;
}

/// Rounded values that are sharded in space. libtorch's kernels round differently, and which one
/// runs depends on channels and memory order: each rank computes complete fields of its samples by
/// `plain`, and keeps its shard of the result. Moves subject to Policies::redistribution.
at::Tensor rounded(const at::Tensor& x, const InterpolationCall& call,
                   const std::function<at::Tensor(const at::Tensor&)>& plain) {
  const ShardSpec lies = without_partial(spec(x));
  std::vector<Placement> placements = lies.placements();
  for (Placement& p : placements)
    if (p.is_shard() && p.dim > 0) p = Replicate();
  const ShardSpec fields = lies.with_placements(placements);
  check_implicit_moves(concat("aten::", call.op->name),
                       {{"self", spec(x), fields, static_cast<std::int64_t>(x.element_size())}},
                       *context_of(lies));
  const at::Tensor local = to_local(redistribute(x, fields));
  const at::Tensor ordered =
      at::empty(local.sizes(),
                local.options().memory_format(call.channels_last ? x.suggest_memory_format()
                                                                 : at::MemoryFormat::Contiguous));
  const at::Tensor y = plain(ordered.copy_(local));
  return redistribute(from_local(y, resampled_spec(fields, call.outputs)),
                      resampled_spec(lies, call.outputs));
}

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const Interpolation& o) : op(o) {}

  void operator()(const OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
    const std::size_t n = handle.schema().arguments().size();
    const auto a = torch::jit::last(*stack, n);
    const at::Tensor x = a[0].toTensor();
    InterpolationCall call;
    call.op = &op;
    for (const std::int64_t size : a[1].toIntVector()) call.outputs.push_back(size);
    const std::size_t scales = op.align_argument ? 3 : 2;
    call.align = op.align_argument && a[2].toBool();
    for (int i = 0; i < op.inner; ++i) call.scales.push_back(a[scales + i].toOptional<double>());
    call.options = x.options();
    call.channels_last =
        op.inner == 2   ? x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)
        : op.inner == 3 ? x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d)
                        : false;
    check(x, call);
    const auto plain = [&](const at::Tensor& local) {
      const LocalCallGuard guard;
      Stack arguments = a.vec();
      arguments[0] = local;
      handle.callBoxed(&arguments);
      return arguments[0].toTensor();
    };
    const bool rounds = !at::isFloatingType(x.scalar_type()) && !op.nearest;
    answer(stack, n,
           rounds && any_distributed(spec(x), 2) ? rounded(x, call, plain)
                                                 : apply(op.name.c_str(), x, cached(x, call)));
  }

  void check(const at::Tensor& x, const InterpolationCall& call) const {
    const auto& sizes = call.outputs;
    if (x.dim() != op.inner + 2 || static_cast<int>(sizes.size()) != op.inner)
      throw InvalidArgument(op.name, " of a tensor of ", x.dim(), " dims to ", sizes.size(),
                            " sizes: give samples x channels x ", op.inner, " spatial dims and ",
                            op.inner, " sizes");
    for (int i = 0; i < op.inner; ++i)
      if (x.size(i + 2) < 1 || sizes[i] < 1)
        throw InvalidArgument(op.name, " from ", x.sizes(), " to ", list(sizes),
                              ": spatial sizes are at least 1");
    if (x.size(1) < 1)
      throw InvalidArgument(op.name, " of a tensor of shape ", x.sizes(),
                            ": there are no channels");
    if (!at::isFloatingType(x.scalar_type()) && x.scalar_type() != at::kByte)
      throw InvalidArgument(op.name, " of ", c10::toString(x.scalar_type()),
                            " values: libtorch resamples floating-point and uint8 ones");
  }

  const Interpolation& op;
};

const std::vector<Interpolation>& interpolations() {
  static const std::vector<Interpolation> all = [] {
    std::vector<Interpolation> ops;
    for (int inner = 1; inner <= 3; ++inner) {
      ops.push_back({concat("upsample_nearest", inner, "d"), inner, 1, false, true});
      ops.push_back({concat("_upsample_nearest_exact", inner, "d"), inner, 1, false, true});
    }
    ops.push_back({"upsample_linear1d", 1, 1});
    ops.push_back({"upsample_bilinear2d", 2, 1});
    ops.push_back({"upsample_trilinear3d", 3, 1});
    ops.push_back({"upsample_bicubic2d", 2, 2});
    ops.push_back({"_upsample_bilinear2d_aa", 2, 1, true, false, true});
    ops.push_back({"_upsample_bicubic2d_aa", 2, 2, true, false, true});
    ops.push_back({"_upsample_lanczos2d_aa", 2, 3, true, false, true});
    return ops;
  }();
  return all;
}

// Gradients that are called directly, of images [samples, channels, ...] or [channels, ...]. The
// size of the input is an argument.
Plan upsample_backward(const OpCall& call, int inner) {
  const int n = call.tensor(0).spec.dims();
  Shape size = call.integers("input_size");
  LabelProblem p(call);
  p.inputs = {last_dims_unsharded(n, inner)};
  p.outputs = p.inputs;
  p.output_shapes = {size};
  Plan plan = solve(p);
  for (int d = 0; d < n - inner; ++d) size[d] = plan.inputs[0]->local_shape()[d];
  plan.arguments = {{call.argument("input_size"), c10::IValue(c10::List<std::int64_t>(size))}};
  plan.outputs[0].strides = std::nullopt;
  return plan;
}

const AtStart registered([] {
  for (const Interpolation& op : interpolations()) {
    register_rule(
        concat("aten::", op.name, "_backward"),
        guarded([inner = op.inner](const OpCall& c) { return upsample_backward(c, inner); }));
    if (c10::Dispatcher::singleton().findSchema({concat("aten::", op.name), ""}))
      register_decomposition(op.name.c_str(), [&op] {
        return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op));
      });
  }
});

}  // namespace
}  // namespace tessera::detail::interpolation_rules
