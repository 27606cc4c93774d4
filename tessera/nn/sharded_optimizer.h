#pragma once
// ShardedOptimizer: an optimizer whose states are sharded over ranks that have the same parameters,
// as those of DistributedDataParallel have: each rank keeps the moments of its shard, updates that,
// and the ranks exchange what they have updated.
//
//   DistributedDataParallel ddp(net, manager.world());
//   const auto mesh = manager.mesh({{"data", manager.world_size()}});
//   ShardedOptimizer<torch::optim::AdamW> optimizer(net->parameters(), mesh,
//                                                   torch::optim::AdamWOptions(1e-3));
//
// It is one of libtorch's optimizers, and is used as such: groups of parameters, learning rate
// schedulers, closures, clipping before step(), and add_optimizer() and load_optimizer() of
// checkpoints, whose moments are those of the unsharded optimizer, for any number of ranks.
//
// How it works (ZeRO, stage 1; https://arxiv.org/abs/1910.02054). Parameters lie in flat chunks,
// cut into one interval for each rank, between rows. step() gives the optimizer ShardTensors over
// the rows of this rank, in the parameters' own memory, in the place of the parameters, and gathers
// the chunks afterwards. What an optimizer computes of a whole parameter, such as its norm, is
// right as well.
//
// Of P bytes of parameters on n ranks, Adam's moments take 2 P / n instead of 2 P, and each step
// receives P (n - 1) / n.

#include <ATen/core/grad_mode.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/tensor/shard_tensor.h"

namespace tessera {

/// What is known of an optimizer whose states are sharded while its parameters are not.
class ShardedStates {
 public:
  virtual ~ShardedStates();
  /// A tensor laid out as the states of a parameter of the optimizer are. Collective over the mesh
  /// the first time after parameters were added.
  virtual at::Tensor like(const at::Tensor& parameter) = 0;
};

namespace detail {

// What ShardedOptimizer does that does not depend on the optimizer.
class OptimizerShards {
 public:
  OptimizerShards(const DeviceMesh& mesh, std::int64_t chunk_bytes);

  /// Plans parameters that are not known yet. Collective over the mesh.
  void plan(const torch::optim::Optimizer& optimizer);
  at::Tensor like(const at::Tensor& parameter) const;
  /// Calls `update` with shards in the place of the optimizer's parameters, and gathers them.
  void step(torch::optim::Optimizer& optimizer, const std::function<void()>& update);

  /// The same for an optimizer that is not libtorch's own. Returns those that are sharded from now
  /// on. Collective over the mesh where one is not known yet.
  std::vector<at::Tensor> plan(const std::vector<at::Tensor>& parameters);
  /// What an optimizer updates in the place of each: a ShardTensor over this rank's rows, in the
  /// parameter's memory, with its gradient; the parameter itself where it is not sharded.
  std::vector<at::Tensor> shards(const std::vector<at::Tensor>& parameters) const;
  /// This rank's rows of `state`, a plain tensor of the parameter's shape, in memory of their own;
  /// `state` itself where the parameter is not sharded.
  at::Tensor shard_state(const at::Tensor& parameter, const at::Tensor& state) const;
  /// Gathers the rows that all ranks have updated. Collective over the mesh.
  void gather();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

[[noreturn]] void refuse_archive();

}  // namespace detail

/// Parameters are plain, row-major tensors that are equal on all ranks of the mesh, as their
/// gradients are when step() is called. ShardTensors among them, and tensors without dims, are left
/// to the optimizer as they are.
template <class Base>
class ShardedOptimizer final : public Base, public ShardedStates {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>);
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Base>,
                "LBFGS keeps products over all parameters at once, in flat tensors of its own: its "
                "states cannot be sharded by parameter");

 public:
  using LossClosure = typename Base::LossClosure;

  /// `parameters` (tensors, or groups of them) and `arguments` are those of the optimizer; states
  /// are sharded over all ranks of `mesh`. Collective over it. Throws MismatchError if the ranks'
  /// parameters differ in shape, dtype or order, InvalidArgument if one has no values.
  template <class Parameters, class... Arguments>
  ShardedOptimizer(Parameters parameters, const DeviceMesh& mesh, Arguments&&... arguments)
      : Base(std::move(parameters), std::forward<Arguments>(arguments)...),
        shards_(mesh, std::int64_t{25} << 20) {
    shards_.plan(*this);
  }

  /// Collective over the mesh. Throws InvalidArgument for a gradient that is sparse or has another
  /// shape or dtype than its parameter; on every rank, if one rank alone fails, as an operator of
  /// ShardTensors does.
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    shards_.step(*this, [this] { Base::step(); });
    return loss;
  }

  at::Tensor like(const at::Tensor& parameter) override {
    shards_.plan(*this);
    return shards_.like(parameter);
  }

  /// Not these: they know nothing of shards. Throws NotAvailable; see add_optimizer() and
  /// load_optimizer().
  void save(torch::serialize::OutputArchive&) const override { detail::refuse_archive(); }
  void load(torch::serialize::InputArchive&) override { detail::refuse_archive(); }

 private:
  detail::OptimizerShards shards_;
};

}  // namespace tessera
