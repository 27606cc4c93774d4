#include "tessera/nn/parameter_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <memory>

#include "tessera/base/text.h"
#include "tessera/gradient/announce.h"
#include "tessera/gradient/hooks.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

bool reduction_between(const ShardSpec& have, const ShardSpec& wanted,
                       UnreducedGradient& reduction) {
  const auto& context = context_of(wanted);
  if (context_of(have) != context || have.shape() != wanted.shape()) return false;
  std::vector<int> reduced, scattered;
  int dim = -1;
  for (int axis = 0; axis < have.mesh_dims(); ++axis) {
    const Placement h = have.placements()[axis], w = wanted.placements()[axis];
    if (h == w) continue;
    if (!h.is_partial(ReduceOp::Kind::sum) || (w.is_shard() && dim >= 0 && w.dim != dim))
      return false;
    if (w.is_shard()) {
      dim = w.dim;
      scattered.push_back(axis);
    } else {
      reduced.push_back(axis);
    }
  }
  for (int d = 0; d < have.dims(); ++d) {
    if (d == dim ? have.is_sharded(d) : !(have.dim(d) == wanted.dim(d))) return false;
  }
  std::erase_if(reduced, [&](int axis) { return context->sizes[axis] == 1; });
  reduction.group = context->mesh.group(reduced);
  reduction.scatter_dim = dim;
  if (dim >= 0) {
    reduction.scatter = context->mesh.group(scattered);
    reduction.rows = wanted.dim(dim).partition.sizes();
  }
  return true;
}

bool make_partial(const at::Tensor& value, const ShardSpec& partial) {
  const ShardMeta& meta = *meta_of(value);
  const ShardSpec& have = meta.spec();
  const auto& context = context_of(have);
  if (context_of(partial) != context || partial.shape() != have.shape()) return false;
  bool mine = true;
  for (int axis = 0; axis < have.mesh_dims(); ++axis) {
    const Placement h = have.placements()[axis], t = partial.placements()[axis];
    if (h == t) continue;
    if (!t.is_partial(ReduceOp::Kind::sum) || h.is_partial()) return false;
    if (h.is_replicate()) mine &= context->coordinate[axis] == 0;
  }
  // What each rank holds must lie within its part of the partial sum. Checked for all ranks, so
  // that all come to the same answer.
  for (int position = 0; position < context->mesh.layout().size(); ++position) {
    const Box held = have.sharding().box(position), within = partial.sharding().box(position);
    for (std::size_t d = 0; d < held.size(); ++d) {
      if (held[d].size() > 0 && (held[d].begin < within[d].begin || held[d].end > within[d].end))
        return false;
    }
  }
  const LocalCallGuard guard;
  auto layout = make_layout(partial, value.strides(), 0, meta.layout->dtype, meta.layout->device);
  at::Tensor local = at::zeros(partial.local_shape(), meta.local.options());
  if (mine && meta.local.numel() > 0) {
    at::Tensor place = local;
    for (int d = 0; d < have.dims(); ++d)
      place = place.narrow(d, have.local_offset()[d] - partial.local_offset()[d],
                           have.local_shape()[d]);
    place.copy_(meta.local);
  }
  at::Tensor in_order = aligned(std::move(local), *layout);
  install(value, std::move(in_order), std::move(layout));
  return true;
}

namespace {

class ParameterAccess final : public GradientAccess {
 public:
  explicit ParameterAccess(std::optional<at::ScalarType> message) : message_(message) {}
  at::Tensor like(const at::Tensor& parameter) const override { return meta_of(parameter)->local; }
  std::string describe(const at::Tensor& parameter) const override {
    return concat(spec(parameter), ", ", parameter.scalar_type());
  }
  bool uniform() const override { return true; }  // one program on global tensors

  UnreducedGradient unreduced(const at::Tensor& parameter, const Group&) const override {
    const at::Tensor& grad = parameter.grad();
    UnreducedGradient result;
    const ShardMeta* meta = grad.defined() ? meta_of(grad) : nullptr;
    if (meta && !(meta->spec() == spec(parameter)) &&
        reduction_between(meta->spec(), spec(parameter), result))
      result.value = meta->local;
    result.message = message_;
    return result;
  }

  void packed(const at::Tensor& parameter) const override { parameter.mutable_grad().reset(); }

  void store(const at::Tensor& parameter, const at::Tensor& reduced, bool) const override {
    const ShardMeta& meta = *meta_of(parameter);
    at::Tensor value = wrap_fresh(reduced, make_layout(meta.spec(), parameter.strides(), 0,
                                                       meta.layout->dtype, meta.layout->device));
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) {
      grad = std::move(value);
      return;
    }
    // More has been accumulated since the bucket was packed.
    if (meta_of(grad)) make_partial(value, spec(grad));
    grad = grad + value;
  }

 private:
  const std::optional<at::ScalarType> message_;
};

// Before a partial gradient is added to one that has been reduced, that one becomes partial itself:
// nothing is sent before the sum is complete.
struct Accumulate {
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    const auto impl = parameter.lock();
    if (!impl || !gradient.defined() || at::GradMode::is_enabled() ||
        !accumulates_into(at::Tensor(impl)))
      return gradient;
    const at::Tensor& grad = at::Tensor(impl).grad();
    const ShardMeta* incoming = meta_of(gradient);
    if (grad.defined() && incoming && incoming->spec().has_partial() && meta_of(grad) &&
        !(spec(grad) == incoming->spec()))
      make_partial(grad, incoming->spec());
    return gradient;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
};

// After accumulation, a gradient that the reducer does not deal with is redistributed at once to
// its parameter's placements. The reducer's own hook follows.
struct Accumulated final : ChainedHook {
  void accumulated(const at::Tensor& parameter) override {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    const ShardSpec wanted = spec(parameter);
    if (!is_sharded(grad)) grad = promote(grad, context_of(wanted));
    UnreducedGradient reduction;
    if (spec(grad) == wanted ||
        (!at::GradMode::is_enabled() && reduction_between(spec(grad), wanted, reduction)))
      return;
    grad = redistribute(grad, wanted);
  }

  // Set once it is made; the parameters own it.
  std::shared_ptr<GradientReducer> reducer;
};

}  // namespace

void reduce_parameters(const std::vector<UnitParameter>& parameters, const DeviceMesh& mesh,
                       const ReducerOptions& options) {
  if (parameters.empty()) return;
  const Group all = MeshContext::of(mesh)->mesh.all();
  std::map<std::optional<at::ScalarType>, std::shared_ptr<ParameterAccess>> access;
  std::vector<ReducedParameter> reduced;
  std::vector<Accumulated*> hooks;
  for (const auto& [name, parameter, unit, message] : parameters) {
    auto& of = access[message];
    if (!of) of = std::make_shared<ParameterAccess>(message);
    reduced.push_back({parameter, name, all, ReduceOp::sum, of, unit});
    add_hook_before(
        parameter,
        Accumulate{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr())});
    auto after = std::make_unique<Accumulated>();
    hooks.push_back(after.get());
    add_hook_after(parameter, std::move(after));
  }
  const auto reducer = std::make_shared<GradientReducer>(std::move(reduced), options);
  for (Accumulated* hook : hooks) hook->reducer = reducer;
}

}  // namespace tessera::detail
