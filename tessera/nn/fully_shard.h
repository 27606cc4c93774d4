#pragma once
// fully_shard: every rank keeps a shard of each parameter, its gradient and its optimizer state.
// Parameters are gathered unit by unit, ahead of their use, and gradients reduce-scattered while
// backward goes on.
//
//   fully_shard(*net, mesh);                        // units: the elements of lists and Sequentials
//   fully_shard(*net, mesh, {.units = {"blocks.*", "head"}});
//   fully_shard(*net, mesh, {.axes = {"shard"}});   // replicated over the mesh's other axes
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);         // afterwards
//   auto x = from_local(batch, mesh, {Shard(0)});   // samples sharded over the mesh: any sizes
//   loss(net->forward(x)).backward();
//
// Parameters are ShardTensors as distribute_module() makes them: optimizers, clip_gradients(),
// no_sync(), checkpoints and redistribution are those of any sharded parameter, and the loss and
// all gradients are those of one process with all samples.
//
// Units. A unit is a module; its parameters, but for those of units inside, lie in one flat buffer
// (one for each dtype) that is cut into one interval for each rank, between rows of parameters. An
// all-gather of the intervals is the buffer, and gathered parameters are views of it. Shards are
// therefore uneven, Shard(0) with sizes of its own for each parameter, often empty. Parameters
// without dims or elements, and those that are not row-major, stay outside: the former are
// replicated, the latter sharded evenly and gathered one by one.
//
// Order. C++ modules have no hooks: a unit is gathered when an operator first uses one of its
// parameters, and the order in which that happens is learnt in the first step. From then on the
// next unit is gathered while one computes, and one is released with its last use. A step that goes
// another way is right all the same, is not overlapped, and is learnt for the next one. All ranks
// run the same operators, as everywhere with sharded tensors.
//
// Autocast. What it casts is no longer the parameter: it is gathered by itself where it is used, in
// the lower precision, not with its unit and not ahead. Values are right.
//
// Memory of parameters on each rank: its shards, and `prefetch` + 1 gathered units while a pass is
// overlapped. Gradients: those of the unit at work, complete, and two units' being reduced.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

struct FullyShardOptions {
  /// Patterns of module names ("*" matches any characters, dots included); a module that matches is
  /// a unit, unless it lies in another one that the same pattern matches. What lies in no unit is
  /// one of its own, of the whole module. Empty: the elements of every ModuleList, ModuleDict and
  /// Sequential that lies in no other one.
  std::vector<std::string> units = {};
  /// Axes of the mesh over which parameters are sharded; they are replicated over the others
  /// (hybrid sharding). Empty: all axes. Samples may be sharded over all of them.
  std::vector<std::string> axes = {};
  /// Patterns of parameters and buffers that are left as they are, plain or sharded already.
  std::vector<std::string> ignore = {};
  /// false: parameters that forward gathers stay so until backward has used them, which saves a
  /// third of the traffic.
  bool reshard_after_forward = true;
  /// Units that are gathered ahead of use. At least 0.
  int prefetch = 1;
  /// How gradients are reduced: by default one message a unit. gradient_as_bucket_view has no
  /// meaning here.
  ReducerOptions reducer = {.first_bucket_bytes = std::int64_t{1} << 30,
                            .bucket_bytes = std::int64_t{1} << 30,
                            .learn_order = true};
};

/// Shards the parameters of `module` over `mesh`, in place, and replicates its buffers; values are
/// those of the mesh's first rank. Collective over the mesh. Call it before the first forward and
/// before the optimizer is made. Modules that fully_shard() has sharded already, on this mesh or
/// another one, are left as they are. Throws as distribute_module() does; InvalidArgument for an
/// axis that the mesh does not have, a pattern that matches nothing, a negative prefetch.
void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh,
                 const FullyShardOptions& options = {});

/// Starts to gather all units that hold a parameter of `module`, and keeps them gathered until
/// release_parameters(): for a schedule that uses them several times. Collective over the axes that
/// shard them. Throws InvalidArgument if fully_shard() has sharded none of them.
void gather_parameters(const torch::nn::Module& module);

/// Releases what is gathered of the units that hold a parameter of `module`; the next use gathers
/// it again. Needed where the memory of a shard was written to by other means than operators on the
/// parameter or load(), after a forward without a backward: on all ranks alike. Throws as
/// gather_parameters().
void release_parameters(const torch::nn::Module& module);

}  // namespace tessera
