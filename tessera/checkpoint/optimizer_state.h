#pragma once
// The state of libtorch's optimizers in a checkpoint: moments by the names of the parameters they
// belong to, laid out as those are; step counts and the options of parameter groups as values.
//
//   CheckpointState state;
//   state.add("net.", *net);
//   add_optimizer(state, "adam.", adam, *net);
//   checkpoints.save("step-100", state);
//   ...
//   load_optimizer(saved, "adam.", adam, *net);   // a fresh one, before or after its first step
//
// For Adam, AdamW, SGD, RMSprop and Adagrad. Names: "adam.net.0.weight.exp_avg" and so on.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/state.h"

namespace tessera {

/// Adds the state of every parameter of the optimizer; parameters without one, as before the first
/// step, add nothing. `shards` are those of the module's parameters that are cut by hand. Throws
/// InvalidArgument for a parameter that is not the module's, NotAvailable for another optimizer.
void add_optimizer(CheckpointState& state, const std::string& prefix,
                   torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                   const HandShards& shards = {});

/// Makes the optimizer's state that of the checkpoint, on any mesh: parameters that have no state
/// there lose theirs. Options of the groups (learning rate and so on) too, if the checkpoint has
/// groups of the same number. Nothing is changed if anything throws. Collective over the reader's
/// group.
void load_optimizer(const CheckpointReader& saved, const std::string& prefix,
                    torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const HandShards& shards = {}, const LoadOptions& options = {});

}  // namespace tessera
