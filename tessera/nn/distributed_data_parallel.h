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

#include "tessera/gradient/reducer.h"
#include "tessera/gradient/step_weight.h"
#include "tessera/gradient/sync.h"

namespace tessera {

struct DistributedDataParallelOptions {
  ReducerOptions reducer = {};
  /// How the ranks' gradients come together. avg: each rank's loss is a mean of its own, as of
  /// ordinary data parallelism. sum: each rank's gradient is a summand of one loss's, as where
  /// sharded tensors are made of the module's output (from_local), or its input is a sharded
  /// tensor's local (to_local). premultiplied: weighted by hand, each rank by its own factor. A
  /// denominator that is known only after a step is StepWeight's.
  ReduceOp reduction = ReduceOp::avg;
  /// Buffers (running statistics) are broadcast from rank 0 before each forward in training, of
  /// those of a step with no_sync() before the first.
  bool broadcast_buffers = true;
  /// Names of parameters and buffers that the user takes care of: neither broadcast nor reduced.
  std::vector<std::string> ignore = {};
};

namespace detail {

// All that does not depend on the module's type.
class DataParallelEngine {
 public:
  DataParallelEngine(std::shared_ptr<torch::nn::Module> module, Group group,
                     DistributedDataParallelOptions options);
  void before_forward();
  void broadcast_buffers() const;
  GradientReducer& reducer() { return *reducer_; }
  const Group& group() const { return group_; }
  ReduceOp reduction() const { return options_.reduction; }
  const torch::nn::Module& module() const { return *module_; }

 private:
  bool reduces(const std::string& name) const;

  std::shared_ptr<torch::nn::Module> module_;
  Group group_;
  DistributedDataParallelOptions options_;
  std::unique_ptr<GradientReducer> reducer_;
  /// The last forward in training was one of a backward that is synchronised.
  bool buffers_due_ = true;
};

}  // namespace detail

/// `Module`: a module holder (what TORCH_MODULE makes) or a shared_ptr to a module; its forward may
/// take and return anything.
///
/// Construction is collective: parameters and buffers are broadcast from rank 0, and ranks whose
/// modules differ all get a MismatchError. Parameters that distribute_module() sharded over a mesh
/// of other ranks (the group's ranks hold the same shards) are reduced as well, after their own
/// mesh has reduced them, at the end of backward; a parameter whose shards lie on ranks of the
/// group is refused with a ShardingError. distribute_module() comes first, then the wrapper. Every
/// rank must run the same number of synchronised backwards. A rank whose batch is empty runs
/// forward and backward all the same (with samples = 0), or calls reduce(). backward() throws
/// GradientError where the gradients that come do not fit DistributedDataParallelOptions::reduction
/// (see GradientReducer).
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
  /// backward gives the gradient that one process with all samples would have, whether the ranks'
  /// gradients are averaged or summed. See tessera::mean_loss. Without it every rank's loss has the
  /// same weight. Throws InvalidArgument where the reduction is premultiplied.
  at::Tensor mean_loss(const at::Tensor& loss, double samples) const {
    return tessera::mean_loss(loss, samples, engine_.group(), engine_.reduction());
  }

  /// While the result lives, gradients accumulate locally, and the next backward outside reduces
  /// their sum: no_sync(*module()), which is for all that reduce a parameter of the module.
  [[nodiscard]] NoSync no_sync() const { return NoSync(engine_.module().parameters()); }
  /// Gives all ranks rank 0's buffers now: for a program that has
  /// DistributedDataParallelOptions::broadcast_buffers off, or before an evaluation. Collective.
  void broadcast_buffers() const { engine_.broadcast_buffers(); }
  /// Reduces now what has been accumulated and not been reduced, without a backward. Collective.
  void reduce() { reduce_gradients(engine_.module().parameters()); }

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
