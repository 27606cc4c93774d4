#include "tessera/nn/parameter_gradient.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

bool reduction_between(const ShardSpec& have, const ShardSpec& wanted, OwedGradient& reduction) {
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

bool make_term(const at::Tensor& value, const ShardSpec& terms) {
  const ShardMeta& meta = *meta_of(value);
  const ShardSpec& have = meta.spec();
  const auto& context = context_of(have);
  if (context_of(terms) != context || terms.shape() != have.shape()) return false;
  bool mine = true;
  for (int axis = 0; axis < have.mesh_dims(); ++axis) {
    const Placement h = have.placements()[axis], t = terms.placements()[axis];
    if (h == t) continue;
    if (!t.is_partial(ReduceOp::Kind::sum) || h.is_partial()) return false;
    if (h.is_replicate()) mine &= context->coordinate[axis] == 0;
  }
  // What each rank has must lie within its term; looked at for all ranks, so that all come to the
  // same answer.
  for (int position = 0; position < context->mesh.layout().size(); ++position) {
    const Box part = have.sharding().box(position), whole = terms.sharding().box(position);
    for (std::size_t d = 0; d < part.size(); ++d) {
      if (part[d].size() > 0 && (part[d].begin < whole[d].begin || part[d].end > whole[d].end))
        return false;
    }
  }
  const LocalCallGuard guard;
  auto layout = make_layout(terms, value.strides(), 0, meta.layout->dtype, meta.layout->device);
  at::Tensor local = at::zeros(terms.local_shape(), meta.local.options());
  if (mine && meta.local.numel() > 0) {
    at::Tensor place = local;
    for (int d = 0; d < have.dims(); ++d)
      place =
          place.narrow(d, have.local_offset()[d] - terms.local_offset()[d], have.local_shape()[d]);
    place.copy_(meta.local);
  }
  at::Tensor laid_out = aligned(std::move(local), *layout);
  install(value, std::move(laid_out), std::move(layout));
  return true;
}

namespace {

class ParameterAccess final : public GradientAccess {
 public:
  at::Tensor like(const at::Tensor& parameter) const override { return meta_of(parameter)->local; }
  std::string describe(const at::Tensor& parameter) const override {
    return concat(spec(parameter), ", ", parameter.scalar_type());
  }
  bool alike() const override { return true; }  // one program on global tensors

  OwedGradient owed(const at::Tensor& parameter, const Group&) const override {
    const at::Tensor& grad = parameter.grad();
    OwedGradient owed;
    const ShardMeta* meta = grad.defined() ? meta_of(grad) : nullptr;
    if (meta && !(meta->spec() == spec(parameter)) &&
        reduction_between(meta->spec(), spec(parameter), owed))
      owed.value = meta->local;
    return owed;
  }

  void taken(const at::Tensor& parameter) const override { parameter.mutable_grad().reset(); }

  void store(const at::Tensor& parameter, const at::Tensor& reduced, bool) const override {
    const ShardMeta& meta = *meta_of(parameter);
    at::Tensor value = wrap_fresh(reduced, make_layout(meta.spec(), parameter.strides(), 0,
                                                       meta.layout->dtype, meta.layout->device));
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) {
      grad = std::move(value);
      return;
    }
    // More was accumulated meanwhile.
    if (meta_of(grad)) make_term(value, spec(grad));
    grad = grad + value;
  }
};

// Before a term is added to a gradient that is reduced already, that one becomes a term itself:
// nothing is sent before the sum is complete.
struct Accumulate final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const auto impl = parameter.lock();
    if (!impl || gradients.empty() || !gradients[0].defined() || at::GradMode::is_enabled() ||
        !accumulates(at::Tensor(impl)))
      return gradients;
    const at::Tensor& grad = at::Tensor(impl).grad();
    const ShardMeta* incoming = meta_of(gradients[0]);
    if (grad.defined() && incoming && incoming->spec().has_partial() && meta_of(grad) &&
        !(spec(grad) == incoming->spec()))
      make_term(grad, incoming->spec());
    return gradients;
  }

  // autograd::grad() comes by here too, and accumulates nothing.
  static bool accumulates(const at::Tensor& leaf) {
    const auto* asked = torch::autograd::get_current_graph_task_exec_info();
    if (!asked || asked->empty()) return true;
    const auto it = asked->find(torch::autograd::impl::gradient_edge(leaf).function.get());
    return it != asked->end() && it->second.needed_;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> parameter{c10::intrusive_ptr<c10::TensorImpl>()};
  std::shared_ptr<GradientReducer> reducer;  // set once it is made; the parameters own it
};

// After accumulation: what the reducer does not deal with is laid out like the parameter at once.
// The reducer's own hook follows.
struct Accumulated final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    if (before) (*before)(parameter);
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    const ShardSpec wanted = spec(parameter);
    if (!is_sharded(grad)) grad = promote(grad, context_of(wanted));
    OwedGradient reduction;
    if (spec(grad) == wanted ||
        (!at::GradMode::is_enabled() && reduction_between(spec(grad), wanted, reduction)))
      return;
    grad = redistribute(grad, wanted);
  }

  std::unique_ptr<PostAccumulateGradHook> before;
};

}  // namespace

void reduce_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                       const DeviceMesh& mesh, const ReducerOptions& options) {
  if (parameters.empty()) return;
  const Group all = MeshContext::of(mesh)->mesh.all();
  const auto access = std::make_shared<ParameterAccess>();
  std::vector<ReducedParameter> reduced;
  std::vector<Accumulate*> hooks;
  for (const auto& [name, parameter] : parameters) {
    reduced.push_back({parameter, name, all, ReduceOp::sum, access});
    auto hook = std::make_unique<Accumulate>();
    hook->parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr());
    hooks.push_back(hook.get());
    torch::autograd::impl::add_hook(parameter, std::move(hook));
    auto after = std::make_unique<Accumulated>();
    after->before = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(after));
  }
  const auto reducer = std::make_shared<GradientReducer>(std::move(reduced), options);
  for (Accumulate* hook : hooks) hook->reducer = reducer;
}

std::vector<std::shared_ptr<GradientReducer>> reducers_of(const torch::nn::Module& module) {
  return reducers_of(module.parameters());
}

std::vector<std::shared_ptr<GradientReducer>> reducers_of(
    const std::vector<at::Tensor>& parameters) {
  std::vector<std::shared_ptr<GradientReducer>> all;
  for (const at::Tensor& parameter : parameters) {
    for (const auto& hook : torch::autograd::impl::hooks(parameter)) {
      const auto* ours = dynamic_cast<const Accumulate*>(hook.get());
      if (ours && std::find(all.begin(), all.end(), ours->reducer) == all.end())
        all.push_back(ours->reducer);
    }
  }
  return all;
}

}  // namespace tessera::detail
