#pragma once
// Gradients of sharded parameters: what backward leaves as partial sums is reduced in buckets,
// while it runs.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// How a gradient that lies as `have` becomes one that lies as `wanted` by reducing what is
/// partial: over which groups, and what is scattered. The value is left undefined. False: it takes
/// more than that.
bool reduction_between(const ShardSpec& have, const ShardSpec& wanted, OwedGradient& reduction);

/// A value that lies as `have` as one rank's term of a sum that lies as `terms`, the other ranks'
/// being zero: nothing is sent. False, and nothing is changed, where that is not possible.
bool make_term(const at::Tensor& value, const ShardSpec& terms);

/// Sets the hooks. Collective over the mesh.
void reduce_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                       const DeviceMesh& mesh, const ReducerOptions& options);

/// The reducers of the module's sharded parameters, each once.
std::vector<std::shared_ptr<GradientReducer>> reducers_of(const torch::nn::Module& module);
std::vector<std::shared_ptr<GradientReducer>> reducers_of(
    const std::vector<at::Tensor>& parameters);

}  // namespace tessera::detail
