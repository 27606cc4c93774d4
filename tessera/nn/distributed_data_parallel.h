#pragma once
// DistributedDataParallel: an ordinary torch::nn module whose gradients are the mean over the ranks
// of a group.
//
//   UNet net;
//   tessera::DistributedDataParallel ddp(net, manager.world());
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);
//   for (auto& batch : loader) {  // ranks may hold different numbers of samples
//     auto loss = ddp.mean_loss(torch::mse_loss(ddp(batch.input), batch.target),
//       batch.input.size(0));
//     optimizer.zero_grad();
//     loss.backward();  // buckets are reduced while it runs
//     optimizer.step();
//   }

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/mean_loss.h"
#include "tessera/gradient/reducer.h"

namespace tessera {

struct DistributedDataParallelOptions {
  ReducerOptions reducer;
  /// Rank 0's buffers (running statistics) are everybody's before each forward in training.
  bool broadcast_buffers = true;
  /// Names of parameters and buffers that the user takes care of: neither broadcast nor reduced.
  std::vector<std::string> ignore;
};

namespace detail {

// All that does not depend on the module's type.
class DataParallelEngine {
 public:
  DataParallelEngine(std::shared_ptr<torch::nn::Module> module, Group group,
                     DistributedDataParallelOptions options);
  void before_forward();
  GradientReducer& reducer() { return *reducer_; }
  const Group& group() const { return group_; }

 private:
  std::vector<at::Tensor> buffers() const;

  std::shared_ptr<torch::nn::Module> module_;
  Group group_;
  DistributedDataParallelOptions options_;
  std::unique_ptr<GradientReducer> reducer_;
};

}  // namespace detail

/// `Module`: a module holder (what TORCH_MODULE makes) or a shared_ptr to a module; its forward may
/// take and return anything.
///
/// Construction is collective: rank 0's parameters and buffers become everybody's, and ranks whose
/// modules differ all get a MismatchError. Parameters that distribute_module() sharded over a mesh
/// of other ranks (the group's ranks hold the same parts) are averaged as well, after their own
/// mesh has reduced them, at the end of backward. Every rank must run the same number of
/// synchronised backwards. A rank whose batch is empty runs forward and backward all the same (with
/// samples = 0), or calls reduce().
template <class Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(Module module, Group group, DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        engine_(shared(module_), std::move(group), std::move(options)) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward(Args&&... args) {
    engine_.before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }

  /// The mean loss over all ranks' samples, from this rank's mean over `samples` of its own; its
  /// backward gives the gradient that one process with all samples would have. See
  /// tessera::mean_loss. Without it every rank's loss has the same weight.
  at::Tensor mean_loss(const at::Tensor& loss, double samples) const {
    return tessera::mean_loss(loss, samples, engine_.group());
  }

  /// While the result lives, gradients accumulate locally; the next backward outside reduces their
  /// sum.
  [[nodiscard]] GradientReducer::NoSync no_sync() { return engine_.reducer().no_sync(); }
  /// Reduces now what is owed, without a backward.
  void reduce() { engine_.reducer().reduce(); }

  Module& module() { return module_; }
  GradientReducer& reducer() { return engine_.reducer(); }

 private:
  template <class M>
  static std::shared_ptr<torch::nn::Module> shared(const M& module) {
    if constexpr (requires { module.ptr(); })
      return module.ptr();
    else
      return module;
  }

  Module module_;
  detail::DataParallelEngine engine_;
};

}  // namespace tessera
