#pragma once
// The parameters of an optimizer by their names, and whether they are those of a checkpoint.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/state.h"

namespace tessera::detail {

struct NamedParameter {
  /// The first in the module.
  std::string name;
  at::Tensor parameter;
  /// Of the optimizer.
  std::size_t group = 0;
};

/// Group by group; a tied parameter, listed under each of its names, comes once. Throws
/// InvalidArgument for a parameter that is not the module's.
std::vector<NamedParameter> named_parameters_of(const torch::optim::Optimizer& optimizer,
                                                const torch::nn::Module& module);

/// Adds the names with their groups; ranks may have other parameters than each other.
void add_parameter_names(CheckpointState& state, const std::string& prefix,
                         const std::vector<NamedParameter>& parameters);
/// Throws InvalidArgument on every rank unless the optimizers of all ranks are together over the
/// parameters that were saved, in the same groups. Checkpoints that have no names are not compared.
/// Collective over the reader's group.
void check_parameter_names(const CheckpointReader& saved, const std::string& prefix,
                           const torch::optim::Optimizer& optimizer,
                           const torch::nn::Module& module);

}  // namespace tessera::detail
