#pragma once
// The state of libtorch's optimizers in a checkpoint: moments by the names of the parameters they
// belong to, sharded as those are; step counts and the options of parameter groups as values.
//
//   CheckpointState state;
//   state.add("net.", *net);
//   add_optimizer(state, "adam.", adam, *net);
//   checkpoints.save("step-100", state);
//   ...
//   load_optimizer(saved, "adam.", adam, *net);   // a fresh one, before or after its first step
//
// For Adam, AdamW, SGD, RMSprop, Adagrad and LBFGS, and for RowwiseAdagrad and SparseAdam of
// tables. Names: "adam.net.0.weight.exp_avg" and so on; what LBFGS keeps is about all parameters at
// once, plain and the same on every rank.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <string>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/state.h"

namespace tessera {

/// Adds the state of every parameter of the optimizer; parameters without one, as before the first
/// step, add nothing. `shards`: those of the module's parameters that are sharded by hand. Throws
/// InvalidArgument for a parameter that is not the module's; NotAvailable for another optimizer,
/// and for LBFGS over parameters that are sharded.
void add_optimizer(CheckpointState& state, const std::string& prefix,
                   torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                   const HandShards& shards = {});

/// Makes the optimizer's state that of the checkpoint, on any mesh: parameters that have no state
/// there lose theirs; options of the groups (learning rate and so on) too. Throws InvalidArgument
/// for an optimizer of another kind, over more or fewer parameters (those of all ranks together) or
/// with other groups. With LoadOptions::allow_missing parameters may differ, and another number of
/// groups leaves their options as they are. Nothing is changed if anything throws.
/// Collective over the reader's group.
void load_optimizer(const CheckpointReader& saved, const std::string& prefix,
                    torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const HandShards& shards = {}, const LoadOptions& options = {});

/// The same in two halves: reads and checks, and returns what makes it the optimizer's, which does
/// not throw. So that several things are loaded together or not at all.
std::function<void()> read_optimizer(const CheckpointReader& saved, const std::string& prefix,
                                     torch::optim::Optimizer& optimizer,
                                     const torch::nn::Module& module, const HandShards& shards = {},
                                     const LoadOptions& options = {});

}  // namespace tessera
