#pragma once
// What the differentiable functions on sharded tensors share: a spec that a node of the graph
// keeps, and where gradients lie.

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/tensor/dispatch/layout.h"

namespace tessera::detail {

/// Throws InvalidArgument for a plain or undefined tensor.
const ShardMeta& meta_or_throw(const at::Tensor& t);

/// A node keeps what its backward needs, looked up nowhere.
void carry(torch::autograd::AutogradContext* ctx, const ShardSpec& spec, const char* name = "spec");
ShardSpec carried(torch::autograd::AutogradContext* ctx, const char* name = "spec");

/// Where the gradient of a tensor of this spec lies: never partial on an axis on which the value is
/// (summed once, it is the gradient of every rank's term). With `chosen`: as chosen, sizes kept
/// where the same axes cut a dim.
ShardSpec gradient_spec(const ShardSpec& spec,
                        const std::optional<std::vector<Placement>>& chosen = std::nullopt);

/// A plain gradient becomes a replicated one.
at::Tensor sharded_gradient(const at::Tensor& gradient, const ShardSpec& like);

}  // namespace tessera::detail
