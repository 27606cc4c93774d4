#pragma once
// distribute_module: turns the parameters and buffers of any torch::nn::Module into sharded tensors, in place, for every handle to them.
//
//   distribute_module(*net, mesh);                                               // replicated
//   distribute_module(*net, mesh, [](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
//     if (name.ends_with("fc1.weight")) return ParameterPlacement{{Replicate(), Shard(0)}};
//     return std::nullopt;                                                       // the default
//   });

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/shard_tensor.h"

namespace tessera {

struct ParameterPlacement {
  std::vector<Placement> placements;
  ShardSizes sizes = {};
};

/// For a parameter or buffer by its full name; nullopt: replicated.
using ModuleRule = std::function<std::optional<ParameterPlacement>(const std::string& name, const at::Tensor& tensor)>;

/// Every rank holds the same module (the same values: they are not compared). After backward each parameter's gradient has the parameter's
/// placements: what is partial is reduced as soon as it is accumulated. No communication here. Call it before the first forward pass and before the
/// optimizer is made. Throws ShardingError for a parameter that has a gradient or a graph, is sharded already, or shares its memory with another
/// parameter that is not the same tensor.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const ModuleRule& rule = {});

}  // namespace tessera
