#include "tessera/nn/detail/parameter_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/internal/hooks.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

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
  for (int position = 0; position < context->mesh.mesh().size(); ++position) {
    const Box held = have.sharding().box(position), within = partial.sharding().box(position);
    for (std::size_t d = 0; d < held.size(); ++d) {
      if (held[d].size() > 0 && (held[d].begin < within[d].begin || held[d].end > within[d].end))
        return false;
    }
  }
  const LocalCallGuard guard;
  auto layout = make_layout(partial, value.strides(), 0, meta.layout->dtype, meta.layout->device);
  // What is to be reduced lies on the device, also where parameters and their gradients do not.
  at::Tensor local =
      at::zeros(partial.local_shape(), meta.local.options().device(meta.layout->device));
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

// How a gradient of one spec becomes one of another by reducing its Partial axes alone.
struct Reduction {
  /// False: reductions alone do not do it, and what follows means nothing.
  bool possible = false;
  /// Over which axes it is all-reduced, and reduce-scattered along `dim`; -1: over none.
  std::vector<int> reduced, scattered;
  int dim = -1;
  /// How many rows each rank keeps.
  Sizes rows;
};

Reduction find_reduction(const ShardSpec& have, const ShardSpec& wanted) {
  Reduction found;
  const auto& context = context_of(wanted);
  if (context_of(have) != context || have.shape() != wanted.shape()) return found;
  for (int axis = 0; axis < have.mesh_dims(); ++axis) {
    const Placement h = have.placements()[axis], w = wanted.placements()[axis];
    if (h == w) continue;
    if (!h.is_partial(ReduceOp::Kind::sum) ||
        (w.is_shard() && found.dim >= 0 && w.dim != found.dim))
      return found;
    if (w.is_shard()) {
      found.dim = w.dim;
      found.scattered.push_back(axis);
    } else {
      found.reduced.push_back(axis);
    }
  }
  for (int d = 0; d < have.dims(); ++d) {
    if (d == found.dim ? have.is_sharded(d) : !(have.dim(d) == wanted.dim(d))) return found;
  }
  std::erase_if(found.reduced, [&](int axis) { return context->sizes[axis] == 1; });
  if (found.dim >= 0) found.rows = wanted.dim(found.dim).partition.sizes();
  found.possible = true;
  return found;
}

// What is the same in every step, and costs more to find than to reduce a small gradient: by the
// specs of a gradient and its parameter, and by the layout of the parameter. Keeps these alive, so
// that their addresses stay theirs, but no group: after an error groups are made anew.
class KnownGradients {
 public:
  std::shared_ptr<const Reduction> reduction(const ShardSpec& have, const ShardSpec& wanted) {
    const std::lock_guard lock(mutex_);
    const std::pair<const void*, const void*> key(have.data().get(), wanted.data().get());
    if (const auto at = reductions_.find(key); at != reductions_.end()) return at->second.found;
    if (reductions_.size() >= kMost) reductions_.clear();
    auto found = std::make_shared<const Reduction>(find_reduction(have, wanted));
    return reductions_.emplace(key, Found{have, wanted, std::move(found)}).first->second.found;
  }
  /// Of the gradient of a parameter, when it is reduced.
  LayoutPtr layout(const LayoutPtr& parameter) {
    const std::lock_guard lock(mutex_);
    if (const auto at = layouts_.find(parameter); at != layouts_.end()) return at->second;
    if (layouts_.size() >= kMost) layouts_.clear();
    const Layout& of = *parameter;
    return layouts_.emplace(parameter, make_layout(of.spec, of.strides, 0, of.dtype, of.device))
        .first->second;
  }

 private:
  static constexpr std::size_t kMost = 4096;
  struct Found {
    ShardSpec have, wanted;
    std::shared_ptr<const Reduction> found;
  };
  // Engine threads of several devices fire hooks at the same time.
  std::mutex mutex_;
  std::map<std::pair<const void*, const void*>, Found> reductions_;
  std::map<LayoutPtr, LayoutPtr> layouts_;
};

// The gradient of a parameter that lies in host memory, there too, once it is complete.
at::Tensor beside(const ShardMeta& parameter, at::Tensor local) {
  if (!in_host_memory(parameter) || local.is_cpu()) return local;
  return to_host(local, parameter.local.is_pinned());
}

class ParameterAccess final : public GradientAccess {
 public:
  ParameterAccess(std::optional<at::ScalarType> message, std::shared_ptr<KnownGradients> known)
      : message_(message), known_(std::move(known)) {}
  at::Tensor like(const at::Tensor& parameter) const override { return meta_of(parameter)->local; }
  std::string describe(const at::Tensor& parameter) const override {
    return concat(spec(parameter), ", ", parameter.scalar_type());
  }
  bool uniform() const override { return true; }  // one program on global tensors

  UnreducedGradient unreduced(const at::Tensor& parameter, const Group& group) const override {
    // Not Group(), which makes one.
    UnreducedGradient result{.value = {}, .group = group, .scatter = group, .message = message_};
    const at::Tensor& grad = parameter.grad();
    const ShardMeta* meta = grad.defined() ? meta_of(grad) : nullptr;
    if (!meta) return result;
    const ShardSpec& wanted = meta_of(parameter)->spec();
    const DeviceMesh& mesh = context_of(wanted)->mesh;
    if (meta->spec() == wanted) {
      result.group = mesh.all();  // which is made anew after a failure
      return result;
    }
    const auto found = known_->reduction(meta->spec(), wanted);
    if (!found->possible) return result;
    result.value = on_device(*meta);
    result.group = mesh.group(found->reduced);
    result.scatter_dim = found->dim;
    if (found->dim >= 0) {
      result.scatter = mesh.group(found->scattered);
      result.rows = found->rows;
    }
    return result;
  }

  void packed(const at::Tensor& parameter) const override { parameter.mutable_grad().reset(); }

  void store(const at::Tensor& parameter, const at::Tensor& reduced, bool) const override {
    const ShardMeta& meta = *meta_of(parameter);
    at::Tensor value =
        wrap_fresh(beside(meta, reduced), known_->layout(meta.layout), meta.layout->device);
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
  const std::shared_ptr<KnownGradients> known_;
};

// Before a partial gradient is added to one that has been reduced, that one becomes partial itself:
// nothing is sent before the sum is complete.
struct Accumulate {
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    if (!gradient.defined() || at::GradMode::is_enabled()) return gradient;
    const ShardMeta* incoming = meta_of(gradient);
    if (!incoming || !incoming->spec().has_partial()) return gradient;
    const at::Tensor of(parameter.lock());
    if (!of.defined() || !of.grad().defined() || !accumulates_into(of)) return gradient;
    const at::Tensor& grad = of.grad();
    if (meta_of(grad) && !(spec(grad) == incoming->spec())) make_partial(grad, incoming->spec());
    return gradient;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
};

// After accumulation, a gradient that the reducer does not deal with is redistributed at once to
// its parameter's placements. The reducer's own hook follows.
struct Accumulated {
  void operator()(const at::Tensor& parameter) const {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    if (!is_sharded(parameter))
      throw GradientError(
          "a parameter that was distributed (shape ", parameter.sizes(),
          ") is a plain tensor now, by set_data() or p.data = ...: copy values into "
          "it instead (copy_() without gradients), or distribute the module anew");
    const ShardMeta& own = *meta_of(parameter);
    const ShardSpec wanted = own.spec();
    const bool offloaded = in_host_memory(own);
    if (!is_sharded(grad)) grad = promote(grad, context_of(wanted));
    if (const ShardSpec& have = meta_of(grad)->spec(); !(have == wanted)) {
      if (at::GradMode::is_enabled() || !known->reduction(have, wanted)->possible) {
        grad = redistribute(grad, wanted);
      } else if (!offloaded || (*reducer)->syncing()) {
        return;
      }
    }
    // A graph of the gradient goes on where it is. What no_sync() accumulates waits beside the
    // parameter until it is reduced.
    if (!offloaded || at::GradMode::is_enabled()) return;
    if (const ShardMeta& made = *meta_of(grad); !made.local.is_cpu())
      grad = wrap_shown(beside(own, made.local), made.layout, made.layout->device);
  }

  std::shared_ptr<KnownGradients> known;
  // Made after the hooks, which own it.
  std::shared_ptr<std::optional<GradientReducer>> reducer;
};

}  // namespace

void reduce_parameters(const std::vector<UnitParameter>& parameters, const DeviceMesh& mesh,
                       const ReducerOptions& options) {
  if (parameters.empty()) return;
  const Group all = MeshContext::of(mesh)->mesh.all();
  const auto known = std::make_shared<KnownGradients>();
  std::map<std::optional<at::ScalarType>, std::shared_ptr<ParameterAccess>> access;
  std::vector<ReducedParameter> reduced;
  const Accumulated accumulated{known, std::make_shared<std::optional<GradientReducer>>()};
  for (const auto& [name, parameter, unit, message] : parameters) {
    auto& of = access[message];
    if (!of) of = std::make_shared<ParameterAccess>(message, known);
    reduced.push_back({parameter, name, all, ReduceOp::sum, of, unit});
    add_hook_before(
        parameter,
        Accumulate{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr())});
    add_hook_after(parameter, accumulated);
  }
  accumulated.reducer->emplace(std::move(reduced), options);
}

}  // namespace tessera::detail
