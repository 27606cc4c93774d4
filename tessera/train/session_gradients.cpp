// The parameters of a session, and what becomes of their gradients between backward and the step.

#include <ATen/ATen.h>

#include <cmath>
#include <unordered_set>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/detail/all_modules.h"
#include "tessera/train/session.h"

namespace tessera {

namespace {

at::Tensor local_gradient(const at::Tensor& gradient) {
  return is_sharded(gradient) ? to_local(gradient) : gradient;
}

}  // namespace

// Each once, as the optimizers have them now: groups may be added at any time.
std::vector<at::Tensor> Session::parameters_of(const std::vector<std::size_t>& which) const {
  std::vector<at::Tensor> all;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const std::size_t i : which) {
    if (i >= optimizers_.size()) throw InvalidArgument("optimizer ", i, " of ", optimizers_.size());
    for (const auto& group : optimizers_[i]->param_groups())
      for (const at::Tensor& p : group.params())
        if (seen.insert(p.unsafeGetTensorImpl()).second) all.push_back(p);
  }
  return all;
}

std::vector<std::size_t> Session::all_optimizers() const {
  return numbers_below(optimizers_.size());
}

// Of the modules, and what only an optimizer knows.
std::vector<at::Tensor> Session::all_parameters() {
  if (module_parameters_.empty()) module_parameters_ = all_->parameters();
  std::vector<at::Tensor> all = module_parameters_;
  for (at::Tensor& p : parameters_of(all_optimizers())) all.push_back(std::move(p));
  return all;
}

// Asked at each step: parameters are frozen and unfrozen, and wrapped anew.
Session::Multiples Session::find_multiples() {
  if (module_parameters_.empty()) module_parameters_ = all_->parameters();
  const bool modules_alone = strategy_->size() > 1 && strategy_->abilities().reduces_modules_alone;
  std::unordered_set<const c10::TensorImpl*> of_modules;
  if (modules_alone)
    for (const at::Tensor& p : module_parameters_) of_modules.insert(p.unsafeGetTensorImpl());
  Multiples all;
  for (const at::Tensor& p : parameters_of(all_optimizers()))
    if (p.requires_grad())
      all[p.unsafeGetTensorImpl()] =
          multiple_of(p, !modules_alone || of_modules.contains(p.unsafeGetTensorImpl()));
  return all;
}

bool Session::overflowed() {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : all_parameters()) {
    if (!p.grad().defined()) continue;
    const at::Tensor gradient = local_gradient(p.grad());
    if (gradient.numel() > 0 && !at::isfinite(gradient).all().item<bool>()) return true;
  }
  return false;
}

// By what the sum of the ranks' gradients of a parameter was multiplied.
double Session::multiple_of(const at::Tensor& parameter, bool reduced) const {
  const auto sum = gradient_sum(parameter);
  if (!sum || sum->scale == 0)
    throw GradientError(
        "a session was given a parameter of which it is not known how its gradients come "
        "together: GradientSync::scale() of what reduces them says nothing, or zero");
  if (sum->reducers > 0) {
    const int losses = strategy_->size() / strategy_->loss_sharing();
    const bool others =
        sum->is_mean() && (sum->count % losses != 0 || sum->count > strategy_->size());
    if (sum->count > 0 && (sum->count < losses || others))
      throw GradientError("a session of ", losses,
                          " ranks with different losses was given "
                          "a parameter (shape ",
                          parameter.sizes(), ") whose gradients come together over ", sum->count,
                          " ranks: reduce them over those that have different losses");
    // Each loss is in a mean as often as ranks share it.
    return sum->is_mean() ? 1.0 / losses : sum->scale;
  }
  if (!reduced)
    throw GradientError(
        "an optimizer has a parameter (shape ", parameter.sizes(),
        ") that is in none of the session's modules, and the strategy '", strategy_->name(),
        "' reduces the gradients of those alone: each rank would train its own; register "
        "it in a module");
  return strategy_->abilities().gradients == Abilities::Gradients::averaged
             ? static_cast<double>(strategy_->loss_sharing()) / strategy_->size()
             : 1.0;
}

void Session::scale_gradients(const std::vector<at::Tensor>& parameters, double weight,
                              const std::optional<Multiples>& multiples) const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters) {
    if (!p.grad().defined()) continue;
    at::Tensor gradient = local_gradient(p.grad());
    double multiple = 1;
    if (multiples) {
      // One that was frozen since backward keeps its gradient until the step is over.
      const auto it = multiples->find(p.unsafeGetTensorImpl());
      multiple = it == multiples->end() ? multiple_of(p, true) : it->second;
    }
    const double factor = unit_ / (multiple * weight);
    if (factor != 1) gradient.mul_(factor);
    if (std::isfinite(options_.clip_value))
      gradient.clamp_(-options_.clip_value, options_.clip_value);
  }
}

// The step is over, or forgotten where an exception has ended it: what was weighed, too. Also
// before the first one: parameters may hold what a session left that an exception ended.
void Session::clear_gradients() {
  for (const at::Tensor& p : all_parameters()) p.mutable_grad().reset();
  clean_ = true;
  weight_.reset();
  owed_ = false;
  made_ = Made::nothing;
}

}  // namespace tessera
