#pragma once
// distribute_module: turns the parameters and buffers of any torch::nn::Module into sharded
// tensors, in place, for every handle to them.
//
//   distribute_module(*net, mesh);                                               // replicated
//   // by name; the others are replicated
//   distribute_module(*net, mesh, {{"*.fc1.weight", {{Replicate(), Shard(0)}}}});
//   distribute_module(*net, mesh, [](const std::string& name, const at::Tensor& t) ->
//     std::optional<ParameterPlacement> {
//     if (t.dim() == 2) return ParameterPlacement{{Shard(0), Replicate()}};
//     return std::nullopt;                                                       // the default
//   });
//
// Gradients. Backward leaves the gradient of a parameter that was used with sharded data as a
// partial sum: added over the ranks it is the gradient of one process. It is reduced over exactly
// the axes on which it is partial, to the parameter's own placements, many gradients in one message
// (GradientReducer), while backward still runs. A gradient that is partial where its parameter is
// sharded is reduce-scattered.
//
// Parameters that are sharded over an axis on which the data they meet is sharded too are gathered
// where an operator uses them, in forward and in backward, and the copy is gone when the operator
// is done (fully sharded data parallelism). Where the operator can work on the shards (rows or
// columns of a product whose data is not sharded otherwise: tensor parallelism), it does.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/placement.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace tessera {

struct ParameterPlacement {
  std::vector<Placement> placements;
  ShardSizes sizes = {};
  /// Says that the data of a linear layer or an embedding, whose weight this is, are sharded along
  /// their sequence.
  SequenceSharding sequence = {};
  /// A parameter whose rows (dim 0) are sharded stays so: it is not gathered where it is used. An
  /// embedding sends indices and rows between the ranks, and its gradient stays with the rows;
  /// other operators treat it as data, and move what costs least.
  bool stays = false;
};

/// Gives the placement of a parameter or buffer, by its full name; nullopt: replicated.
using ModuleRule = std::function<std::optional<ParameterPlacement>(const std::string& name,
                                                                   const at::Tensor& tensor)>;

/// Patterns of full names ("*" matches any characters, dots included), each with the placements of
/// the parameters and buffers that it matches. The first pattern that matches a name counts.
using NamedPlacements = std::vector<std::pair<std::string, ParameterPlacement>>;

/// Every rank holds the same module: names, shapes, dtypes and placements are compared, and the
/// values of the mesh's first rank are broadcast to the others before they are sharded. After
/// backward each parameter's gradient has the parameter's placements. Collective over the mesh.
/// Call it before the first forward pass and before the optimizer is made. `options`: how gradients
/// are reduced (gradient_as_bucket_view has no meaning here). Throws ShardingError for a parameter
/// that has a gradient or a graph, is sharded or wrapped by DistributedDataParallel already, or
/// shares its memory with another parameter that is not the same tensor; MismatchError on every
/// rank if the ranks' modules differ.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                       const ModuleRule& rule = {}, const ReducerOptions& options = {});
/// Does the same with rules by name; throws InvalidArgument for a pattern that matches nothing.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                       const NamedPlacements& patterns, const ReducerOptions& options = {});

/// While the result lives, backward accumulates locally and nothing is sent: see NoSync. Finds all
/// that reduce the gradients of the module's parameters: distribute_module() (whose gradients stay
/// partial sums, and are right all the same), DistributedDataParallel on it or a submodule, and
/// whatever was attached by attach_gradient_sync().
[[nodiscard]] NoSync no_sync(const torch::nn::Module& module);

/// Reduces now what has been accumulated and not been reduced, after no_sync() scopes without a
/// last backward, whoever reduces it. Collective.
void reduce_gradients(const torch::nn::Module& module);

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  /// Or a buffer.
  bool parameter = true;
};
/// distribute_module() for the parameters and buffers of a module that is not C++'s own.
void distribute_in_place(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh,
                         const ModuleRule& rule = {}, const ReducerOptions& options = {});

namespace detail {
/// distribute_in_place() without the reduction of gradients. Returns what was placed: each tensor
/// once, by its first name. `refused`: what this rank throws in its place, and all with it.
std::vector<NamedTensor> place(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh,
                               const ModuleRule& rule, const std::exception_ptr& refused = nullptr);
/// "*" matches any characters.
bool matches(std::string_view name, std::string_view pattern);
/// Runs `plan`, whose text must be the same on all ranks of the mesh, where the message of what it
/// throws is its text: what one rank refuses to do with a module is refused on all. Throws
/// MismatchError, which names `subject`, on all ranks if they differ; else on all what `plan`
/// threw.
void agree_on_plan(const DeviceMesh& mesh, const std::string& subject,
                   const std::function<std::string()>& plan);
}  // namespace detail

/// The same of a TorchScript module, as torch::jit::load() gives it:
///
///   torch::jit::Module net = torch::jit::load("net.pt");
///   tessera::distribute_module(net, mesh);
///   auto y = net.forward({x}).toTensor();   // x is sharded, and so is y
///
/// Parameters and buffers of `module` and of those inside become sharded tensors, in place, as
/// those of a torch::nn::Module do; throws what that throws. What a trace has fixed, a device or a
/// size of a batch, stays as it is.
void distribute_module(torch::jit::Module& module, const DeviceMesh& mesh,
                       const ModuleRule& rule = {}, const ReducerOptions& options = {});

/// A leaf with the values of a sharded `parameter` in memory of its own, sharded as it is and used
/// by layers as it is: gathered for them, or left where it lies. Its gradients are reduced once
/// reduce_copies() has it. One rank may call it alone. Throws ShardingError for a plain tensor.
at::Tensor copy_parameter(const at::Tensor& parameter);

/// Reduces the gradients of sharded parameters from the next backward on, as distribute_module()
/// does for those that it distributes. Collective over their meshes, in the order in which these
/// come. Throws ShardingError for a plain tensor, InvalidArgument for one that is no leaf that
/// requires grad.
void reduce_copies(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const ReducerOptions& options = {});

}  // namespace tessera
