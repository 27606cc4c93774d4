#pragma once
// Helpers shared by the differentiable functions on sharded tensors: specs that a node of the graph
// keeps, and the specs of gradients.

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

/// The meta of a sharded tensor. Throws InvalidArgument for a plain or undefined tensor.
const ShardMeta& meta_or_throw(const at::Tensor& t);
/// The same, for those that read its local: a view that had to be copied, of a base that has
/// changed since, is taken again. Collective: which views are is known from the program's calls.
const ShardMeta& fresh_meta(const at::Tensor& t);

/// Stores `spec` in the autograd context, so that backward finds it there.
void carry(torch::autograd::AutogradContext* ctx, const ShardSpec& spec, const char* name = "spec");
ShardSpec carried(torch::autograd::AutogradContext* ctx, const char* name = "spec");

/// The spec of the gradient of a tensor of this spec: never Partial on an axis on which the value
/// is (summed once, it is the gradient of the value of every rank). With `chosen`: these
/// placements; sizes are kept where the same axes shard a dim.
ShardSpec gradient_spec(const ShardSpec& spec,
                        const std::optional<std::vector<Placement>>& chosen = std::nullopt);

/// Makes a plain gradient a replicated one, with the mesh of `like`.
at::Tensor sharded_gradient(const at::Tensor& gradient, const ShardSpec& like);

}  // namespace tessera::detail
