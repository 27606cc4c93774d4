#include "tessera/nn/distributed_data_parallel.h"

#include <ATen/ATen.h>

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/internal/coalesced.h"
#include "tessera/gradient/internal/hooks.h"
#include "tessera/gradient/sync.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {

namespace {

// A parameter that is sharded over ranks outside the group, whose ranks hold the same shard. Its
// own mesh reduces the gradient first.
class LocalGradient final : public GradientAccess {
 public:
  at::Tensor like(const at::Tensor& parameter) const override {
    return to_local(parameter.detach());
  }
  std::string describe(const at::Tensor& parameter) const override {
    return concat(spec(parameter), ", ", parameter.scalar_type());
  }
  UnreducedGradient unreduced(const at::Tensor& parameter, const Group& group) const override {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) return {grad, group};
    if (!(spec(grad) == spec(parameter)))
      throw GradientError("the gradient of a sharded parameter is still ", spec(grad),
                          " where it is to be ", spec(parameter),
                          ": its own mesh has not reduced it. Use no_sync(module) and "
                          "reduce_gradients(module), which reach all that reduce a parameter.");
    return {to_local(grad.detach()), group};
  }
  void store(const at::Tensor& parameter, const at::Tensor& reduced, bool) const override {
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined()) {
      to_local(grad.detach()).copy_(reduced);
    } else {
      grad = from_local(reduced.clone(), spec(parameter));
    }
  }
};

at::Tensor local_of(const at::Tensor& t) { return is_sharded(t) ? to_local(t.detach()) : t; }

std::string description(const at::Tensor& t) {
  return is_sharded(t) ? concat(spec(t), ", ", t.scalar_type())
                       : concat("shape ", t.sizes(), ", ", t.scalar_type());
}

void require_replicas(const std::vector<NamedTensor>& tensors, const Group& group,
                      ReduceOp::Kind kind) {
  if (kind != ReduceOp::Kind::avg && kind != ReduceOp::Kind::sum &&
      kind != ReduceOp::Kind::premultiplied)
    throw InvalidArgument("DistributedDataParallelOptions::reduction is ", to_string(kind),
                          ", but must be avg, sum or premultiplied");
  for (const auto& [name, t, parameter] : tensors) {
    if (!is_sharded(t)) continue;
    const ShardSpec where = spec(t);
    const Mesh& mesh = where.mesh().mesh();
    const int me = group.ranks()[group.rank()];
    for (int axis = 0; axis < where.mesh_dims(); ++axis) {
      const bool spread = !where.placements()[axis].is_replicate();
      // A mean over ranks whose gradients are equal changes nothing, a sum does.
      if (!spread && kind == ReduceOp::Kind::avg) continue;
      const int shared = shared_ranks(mesh.group(std::vector<int>{axis}, me), group.ranks());
      if (shared > 1)
        throw ShardingError(
            "DistributedDataParallel over group '", group.name(), "': ", name, " is ", where,
            ", and ", shared, " ranks of the group lie along axis ", axis, ", where ",
            spread ? "they hold different shards" : "its gradient is complete on each of them",
            ": its own mesh reduces its gradient. Give a group of ranks "
            "that hold the same shards, or list it in ignore.");
    }
  }
}

}  // namespace

DataParallelEngine::DataParallelEngine(std::shared_ptr<torch::nn::Module> module, Group group,
                                       DistributedDataParallelOptions options)
    : module_(std::move(module)), group_(std::move(group)), options_(std::move(options)) {
  std::set<std::string> unknown(options_.ignore.begin(), options_.ignore.end());
  std::vector<NamedTensor> kept = named_tensors(*module_);
  std::erase_if(kept, [&](const NamedTensor& entry) {
    unknown.erase(entry.name);
    return !reduces(entry.name);
  });
  std::vector<at::Tensor> state;
  std::vector<ReducedParameter> reduced;
  std::set<const c10::TensorImpl*> seen;  // a tensor registered under two names is sent once
  std::string text;
  for (const auto& [name, t, parameter] : kept) {
    if (!seen.insert(t.unsafeGetTensorImpl()).second) continue;
    state.push_back(local_of(t));
    text += concat(parameter ? "parameter '" : "buffer '", name, "', ", description(t),
                   parameter && !t.requires_grad() ? ", frozen" : "", "\n");
    if (parameter && t.requires_grad())
      reduced.push_back({t, name, group_, options_.reduction,
                         is_sharded(t) ? std::make_shared<LocalGradient>() : nullptr});
  }
  for (const std::string& name : unknown)
    text += concat("to ignore, but not in the module: '", name, "'\n");
  // What one rank refuses is refused on all.
  std::exception_ptr refused;
  try {
    require_values("DistributedDataParallel", kept);
    require_replicas(kept, group_, options_.reduction.kind);
  } catch (const Error& e) {
    refused = std::current_exception();
    text += concat(e.what(), "\n");
  }
  agree::same(group_, "the module", text);
  if (!unknown.empty())
    throw InvalidArgument("the module has no parameter or buffer named ", list(unknown),
                          "; names to ignore are as in named_parameters() and named_buffers()");
  if (refused) std::rethrow_exception(refused);
  broadcast_coalesced(state, group_);
  reducer_ = std::make_unique<GradientReducer>(std::move(reduced), options_.reducer);
}

bool DataParallelEngine::reduces(const std::string& name) const {
  return std::ranges::find(options_.ignore, name) == options_.ignore.end();
}

void DataParallelEngine::before_forward() {
  // Frozen when it was wrapped, or new: ranks would train it each by itself, and nobody notice.
  const auto alone = [](const at::Tensor& p) {
    if (!p.requires_grad()) return false;
    // the last hook is a reducer's as a rule, and asking it takes no memory
    const auto* last =
        dynamic_cast<const ChainedHook*>(torch::autograd::impl::post_acc_grad_hooks(p).get());
    return !(last && !last->sync.expired()) && gradient_syncs({p}).empty();
  };
  if (group_.size() > 1 && at::GradMode::is_enabled()) {
    const auto all = module_->parameters();
    if (std::ranges::any_of(all, alone)) {
      for (const auto& item : module_->named_parameters()) {
        if (alone(item.value()) && reduces(item.key()))
          throw GradientError(
              "DistributedDataParallel: '", item.key(),
              "' requires gradients and nothing reduces them: it was frozen, or not there, "
              "when the module was wrapped, or a post-accumulate hook registered since has "
              "taken the place of the reducer's. Wrap it anew, or list it in ignore");
      }
    }
  }
  // Evaluation may run on some ranks alone, so it must not communicate.
  if (!options_.broadcast_buffers || !module_->is_training() || !at::GradMode::is_enabled()) return;
  // Where a step begins, so that what was saved before it is all that it follows from.
  if (std::exchange(buffers_due_, reducer_->syncing())) broadcast_buffers();
}

void DataParallelEngine::broadcast_buffers() const {
  std::vector<at::Tensor> buffers;
  for (const auto& item : module_->named_buffers())
    if (reduces(item.key())) buffers.push_back(local_of(item.value()));
  broadcast_coalesced(buffers, group_);
}

}  // namespace tessera::detail
