#pragma once
// Copies of parameters that distribute_module() has distributed, which nobody reduces yet.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"

namespace tessera {

/// Reduces the gradients of sharded parameters from the next backward on, as distribute_module()
/// does for those that it distributes. Collective over their meshes, in the order in which these
/// come. Throws ShardingError for a plain tensor, InvalidArgument for one that is no leaf that
/// requires grad.
void reduce_copies(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const ReducerOptions& options = {});

}  // namespace tessera
