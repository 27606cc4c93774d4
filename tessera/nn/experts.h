#pragma once
// Mixtures of experts: a layer of many networks of which each token uses a few. Experts lie on an
// axis of the mesh, tokens travel to them and back.
//
//   auto mesh = manager.mesh({{"data", 2}, {"expert", 2}});
//   Experts layer({.experts = 8, .features = 64, .hidden = 256, .chosen = 2});
//   distribute_module(*layer, mesh, {{"up", experts_on(mesh)}, {"down", experts_on(mesh)}});
//   auto x = from_local(tokens, mesh, {Shard(0), Shard(0)});      // any number on each rank
//   auto [y, balance] = layer->forward(x);
//   (loss(x + y) + 0.01 * balance).backward();
//
// What moves: one all-gather of numbers (tokens per expert and rank), one uneven all-to-all of the
// tokens to the ranks of their experts and one back, over the ranks of the axis alone; the same in
// backward. Tokens may be sharded over all axes; over those beside the experts' the experts'
// gradients are partial sums, reduced like those of any parameter (distribute_module()), or further
// sharded by fully_shard().
//
// The result and every gradient are those of one process with all tokens: which expert a token
// chooses depends on that token alone, and which tokens an expert has no room for on the global
// order of tokens. All works on plain tensors as well, in one process.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/distribute_module.h"

namespace tessera {

struct RoutingOptions {
  /// How many experts a token chooses: those of its largest probabilities, of equal ones the first.
  std::int64_t chosen = 1;
  /// Tokens that an expert takes, in multiples of the mean number, rounded up; 0: all that choose
  /// it. Of more, those are left out whose choice comes later: all first choices come before all
  /// second ones, and among these tokens go by their global order.
  double capacity = 0;
  /// The weights of a token's experts are their probabilities, divided by their sum.
  bool normalized = false;
  /// The axis of the mesh on which experts lie.
  std::string axis = "expert";
  /// Experts on each rank of the axis; empty: as even as possible (Partition::even).
  Sizes sizes = {};
};

namespace detail {
struct Routes;
}

/// Which tokens go to which experts: made of one layer's probabilities in one step.
class Routing {
 public:
  /// `probabilities`: [tokens, experts], plain, or sharded on a mesh with the axis of `options`.
  /// Collective over the axes that shard tokens. Throws InvalidArgument for another number of dims,
  /// more choices than experts, none, a negative capacity, a mesh without the axis, and for sizes
  /// that do not fit.
  Routing(const at::Tensor& probabilities, const RoutingOptions& options);

  /// The tokens of this rank's experts, a plain tensor [n, features], expert by expert: those of
  /// each in the order of their ranks, and there first choices first. `tokens`: [tokens, features],
  /// on the mesh of the probabilities. Differentiable; collective over the experts' axis.
  at::Tensor to_experts(const at::Tensor& tokens) const;
  /// What experts have made of them, [n, features], at their tokens again, each multiplied by its
  /// weight and added; zero for tokens that no expert took. Lies as the probabilities do, without
  /// partial sums. Differentiable; collective over the experts' axis.
  at::Tensor to_tokens(const at::Tensor& made) const;

  /// How many tokens each of this rank's experts has, in their order.
  const std::vector<std::int64_t>& counts() const;
  /// The loss that is 1 where all experts are chosen alike, and grows to the number of experts:
  /// their number times the sum over them of the share of choices and the mean probability, as in
  /// the Switch Transformer (https://arxiv.org/abs/2101.03961, equation 4). Differentiable in the
  /// probabilities.
  at::Tensor balance() const;
  /// How many tokens chose each expert, of all ranks, before capacity; the same on all ranks.
  const std::vector<std::int64_t>& chosen() const;
  /// Choices that were left out, of all ranks.
  std::int64_t left_out() const;

 private:
  friend at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weights,
                                    const Routing& routing);
  friend class ExpertsImpl;
  std::shared_ptr<const detail::Routes> routes_;
};

/// The rows of each of this rank's experts times the matrix of that expert: `rows`, plain, [n, in]
/// as Routing::to_experts() gives them, `weights` [experts, in, out], plain in one process or a
/// ShardTensor on the routing's mesh, to [n, out]. Weights that do not lie by their dim 0 on the
/// experts' axis alone are gathered, in forward and in backward. Experts without rows cost nothing
/// and get gradients of zero. Differentiable, twice too. Computes in the dtype of `rows`, which
/// that of `weights` must be: neither autocast nor the precision of a unit applies. Throws
/// InvalidArgument for shapes and dtypes that do not fit.
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weights,
                           const Routing& routing);

/// The placement of the weights of experts, [experts, ...]: dim 0 sharded over `axis`, replicated
/// over the others. Throws InvalidArgument for an axis that the mesh does not have.
ParameterPlacement experts_on(const DeviceMesh& mesh, const std::string& axis = "expert",
                              const Sizes& sizes = {});

struct ExpertsOptions {
  std::int64_t experts = 0;
  /// A token has `features` numbers, an expert `hidden` inside.
  std::int64_t features = 0, hidden = 0;
  /// These mean what they do in RoutingOptions.
  std::int64_t chosen = 1;
  double capacity = 0;
  bool normalized = false;
  std::string axis = "expert";
  /// It is called between the two products of an expert, on plain tensors; default: gelu. What it
  /// throws on one rank alone the others are told.
  std::function<at::Tensor(const at::Tensor&)> activation = {};
};

struct ExpertsOutput {
  /// It has the shape of the input, and lies where that does.
  at::Tensor value;
  /// Routing::balance().
  at::Tensor balance;
};

/// Experts of two linear layers without biases, and a router: softmax(x router^T) chooses, and an
/// expert e makes activation(x up[e]) down[e].
class ExpertsImpl : public torch::nn::Module {
 public:
  /// Throws InvalidArgument for sizes that are not positive.
  explicit ExpertsImpl(ExpertsOptions options);
  /// Draws all weights from a uniform distribution in +-1 / sqrt(inputs).
  void reset_parameters();
  /// `x`: [..., features]; of a sharded one dims before the last are sharded, or none.
  ExpertsOutput forward(const at::Tensor& x);

  const ExpertsOptions options;
  /// [experts, features], [experts, features, hidden], [experts, hidden, features].
  at::Tensor router, up, down;
};
TORCH_MODULE(Experts);

}  // namespace tessera
