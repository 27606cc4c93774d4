#include "tessera/nn/distributed_data_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "tessera/base/text.h"
#include "tessera/comm/group/agreement.h"
#include "tessera/gradient/coalesced.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {

namespace {

// A parameter that is sharded over other ranks than the group's: the group's ranks hold the same
// part. What its own mesh does with the gradient comes first.
class LocalGradient final : public GradientAccess {
 public:
  at::Tensor like(const at::Tensor& parameter) const override {
    return to_local(parameter.detach());
  }
  std::string describe(const at::Tensor& parameter) const override {
    return concat(spec(parameter), ", ", parameter.scalar_type());
  }
  OwedGradient owed(const at::Tensor& parameter, const Group& group) const override {
    const at::Tensor& grad = parameter.grad();
    return {grad.defined() ? to_local(grad.detach()) : grad, group};
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

at::Tensor local_part(const at::Tensor& t) { return is_sharded(t) ? to_local(t.detach()) : t; }

std::string description(const at::Tensor& t) {
  return is_sharded(t) ? concat(spec(t), ", ", t.scalar_type())
                       : concat("shape ", t.sizes(), ", ", t.scalar_type());
}

}  // namespace

DataParallelEngine::DataParallelEngine(std::shared_ptr<torch::nn::Module> module, Group group,
                                       DistributedDataParallelOptions options)
    : module_(std::move(module)), group_(std::move(group)), options_(std::move(options)) {
  std::set<std::string> unknown(options_.ignore.begin(), options_.ignore.end());
  auto ignored = [&](const std::string& name) {
    unknown.erase(name);
    return std::find(options_.ignore.begin(), options_.ignore.end(), name) != options_.ignore.end();
  };
  std::vector<at::Tensor> state;
  std::vector<ReducedParameter> reduced;
  std::set<const c10::TensorImpl*> seen;  // a tensor registered under two names travels once
  std::string text;
  for (const auto& item : module_->named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (ignored(item.key()) || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    state.push_back(local_part(parameter));
    text += concat("parameter '", item.key(), "', ", description(parameter),
                   parameter.requires_grad() ? "" : ", frozen", "\n");
    if (!parameter.requires_grad()) continue;
    reduced.push_back({parameter, item.key(), group_, ReduceOp::avg,
                       is_sharded(parameter) ? std::make_shared<LocalGradient>() : nullptr});
    // Gradients are complete on their own mesh only when backward ends.
    if (is_sharded(parameter)) {
      options_.reducer.overlap = false;
      options_.reducer.gradient_as_bucket_view = false;
    }
  }
  for (const auto& item : module_->named_buffers()) {
    if (ignored(item.key()) || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    state.push_back(local_part(item.value()));
    text += concat("buffer '", item.key(), "', ", description(item.value()), "\n");
  }
  for (const std::string& name : unknown)
    text += concat("to ignore, but not in the module: '", name, "'\n");
  require_agreement(group_, "the module", text);
  if (!unknown.empty())
    throw InvalidArgument(
        concat("the module has no parameter or buffer named ", list(unknown),
               "; names to ignore are as in named_parameters() and named_buffers()"));
  broadcast_coalesced(state, group_, 0);
  reducer_ = std::make_unique<GradientReducer>(std::move(reduced), options_.reducer);
}

std::vector<at::Tensor> DataParallelEngine::buffers() const {
  std::vector<at::Tensor> tensors;
  for (const auto& item : module_->named_buffers())
    if (std::find(options_.ignore.begin(), options_.ignore.end(), item.key()) ==
        options_.ignore.end())
      tensors.push_back(local_part(item.value()));
  return tensors;
}

void DataParallelEngine::before_forward() {
  // Evaluation may run on some ranks alone, so it must not communicate.
  if (!options_.broadcast_buffers || !module_->is_training() || !at::GradMode::is_enabled() ||
      !reducer_->syncing())
    return;
  broadcast_coalesced(buffers(), group_, 0);
}

}  // namespace tessera::detail
