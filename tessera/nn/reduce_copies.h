#pragma once
// Copies of parameters that distribute_module() has distributed, which nobody reduces yet.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"

namespace tessera {

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
