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
// Units. A unit is a module; its parameters, but for those of units inside, lie in a flat buffer
// (one for each dtype, and up to four where a rank holds at least 32 KiB of each) that is cut into
// one interval for each rank, between rows of parameters. An all-gather of the intervals is the
// buffer, and gathered parameters are views of it; their gradients travel together. Shards are
// therefore uneven, Shard(0) with sizes of its own for each parameter, often empty. Parameters
// without dims or elements, and those that are not row-major, stay outside: the former are
// replicated, the latter sharded evenly and gathered one by one.
//
// Tensor parallelism. Parameters that are ShardTensors of this mesh already, as tensor_parallel()
// makes them, are sharded over `axes` as well, along dim 0 or, where another axis shards that, the
// largest dim that none does; without one they stay replicated over `axes`. Units gather them over
// `axes` alone. Their gradients are reduced as what made them ShardTensors was told.
//
// Order. C++ modules have no hooks: a unit is gathered when an operator first uses one of its
// parameters, and the order in which that happens is learnt in the first step. From then on the
// next unit is gathered while one computes, and one is released with its last use. A step that goes
// another way is right all the same, is not overlapped, and is learnt for the next one. All ranks
// run the same operators, as everywhere with sharded tensors.
//
// Mixed precision. `precision` says in which dtype a unit is gathered, in which its operators
// compute, and in which its gradients are reduced. Parameters, gradients and optimizer states keep
// the dtype that the module was made in. An operator that takes one of the unit's parameters
// together with data casts both to the dtype to compute in; what it makes has that dtype, or
// `output`. What is computed of parameters alone, and element by element with tensors of their
// shape and dtype (an optimizer, a penalty), is left alone, and so is batch norm.
//
//   fully_shard(*net, mesh, {.precision = {.parameters = at::kBFloat16}});
//   // the last layer's scores in float32
//   fully_shard(*net, mesh, {.precision = {.parameters = at::kBFloat16},
//                            .unit_precision = {{"head", {at::kBFloat16, {}, at::kFloat}}}});
//
// Autocast comes before the precision of a unit:
//
//   an operator on the unit's parameters    computes in               its result has
//   that autocast casts                     autocast's dtype          `output`, else that dtype
//   that it does not cast                   `precision.parameters`    `output`, else that dtype
//
// What autocast casts is gathered with its unit if `precision.parameters` is autocast's dtype, or
// is not given (then in the parameters' own); else by itself, in autocast's dtype.
//
// Offload. Shards of parameters, their gradients and what an optimizer makes like them may lie in
// host memory, where the optimizer then steps; units are gathered on the device, each copied there
// ahead of its use.
//
//   fully_shard(*net, mesh, {.offload = {.to_host = true}});     // on the manager's device
//   x = from_local(batch.to(manager.device()), mesh, {Shard(0)});
//
// Parameters show the device that operators compute on; to_local() gives the shard, in host memory.
// Operators on what lies there compute there, and one that takes such a tensor together with data
// on the device computes on the device.
//
// Memory of parameters on each rank: its shards, and `prefetch` + 1 gathered units while a pass is
// overlapped, or of units that are gathered together up to three times `coalesce_bytes`.
// Gradients: its shards, and, of the full ones, those of one message and as much again, which is
// packed or travels. A message of 64 KiB or more is packed once the reduce-scatter before it has
// ended; smaller ones do not wait for each other.

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

/// The dtypes of a unit: float16, bfloat16, float32 or float64.
struct UnitPrecision {
  /// The dtype in which parameters are gathered and operators that take them compute; none: each
  /// parameter's own.
  std::optional<at::ScalarType> parameters = {};
  /// The dtype in which gradients are reduced; none: that of the parameter as the module was made.
  std::optional<at::ScalarType> reduce = {};
  /// The dtype of the results of operators that take the unit's parameters; none: as they make
  /// them. Needs `parameters`.
  std::optional<at::ScalarType> output = {};
};

/// Says whether shards lie in host memory.
struct OffloadOptions {
  /// Shards of parameters, reduced gradients, and optimizer states.
  bool to_host = false;
  /// The device that units are gathered on, and buffers lie on; none: the manager's.
  std::optional<c10::Device> device = {};
  /// Host memory of parameters and gradients is page-locked if that is a CUDA device, without
  /// which copies do not overlap with computing.
  bool pin_memory = true;
};

struct FullyShardOptions {
  /// Patterns of module names ("*" matches any characters, dots included); a module that matches is
  /// a unit, unless it lies in another one that the same pattern matches. Parameters outside every
  /// unit form one more unit, named "". Empty: the elements of every ModuleList, ModuleDict and
  /// Sequential that lies in no other one.
  std::vector<std::string> units = {};
  /// Axes of the mesh over which parameters are sharded; they are replicated over the others
  /// (hybrid sharding). Empty: all axes. Samples may be sharded over all of them.
  std::vector<std::string> axes = {};
  /// Patterns of parameters and buffers that are left as they are, plain or sharded already.
  std::vector<std::string> ignore = {};
  /// Patterns of parameters that are not gathered: tables of embeddings, weights of experts. Their
  /// rows (dim 0) are sharded evenly over the axes, outside the units' buffers. An embedding sends
  /// indices and rows between the ranks, and its gradient stays with the rows; other operators
  /// treat such a parameter as data, and move what costs least.
  std::vector<std::string> stay = {};
  /// false: parameters that forward gathers stay so until backward has used them, which saves a
  /// third of the traffic.
  bool reshard_after_forward = true;
  /// Axes, among `axes`, over which units stay sharded after forward: backward gathers over these
  /// alone (the ranks of a host, say), and until then each rank keeps its shard of the unit on
  /// them. Empty: all of `axes`.
  std::vector<std::string> reshard_axes = {};
  /// Units that are gathered ahead of use. At least 0.
  int prefetch = 1;
  /// Once their order is learnt, units that have fewer bytes than this together are gathered in one
  /// message, as many ahead of use as make half of that, and their gradients are reduced together:
  /// a message costs more by itself than such units do. 0: each by itself. Gathers are by
  /// themselves where `prefetch` is 0 and where shards lie in host memory, too.
  std::int64_t coalesce_bytes = 64 << 10;
  /// How gradients are reduced: by default in one message for each flat buffer of a unit, or
  /// several small ones.
  /// gradient_as_bucket_view has no meaning here.
  ReducerOptions reducer = {.first_bucket_bytes = std::int64_t{1} << 30,
                            .bucket_bytes = std::int64_t{1} << 30,
                            .learn_order = true};
  /// The precision of all units that `unit_precision` does not name.
  UnitPrecision precision = {};
  /// Patterns of units' names, each with the precision of the units that it matches. The first
  /// pattern that matches counts; the unit of what lies in no other one has the name "".
  std::vector<std::pair<std::string, UnitPrecision>> unit_precision = {};
  /// The memory of all parameters but those that are ignored.
  OffloadOptions offload = {};
};

/// Shards the parameters of `module` over `mesh`, in place, and replicates its buffers; values are
/// those of the mesh's first rank. Collective over the mesh. Call it before the first forward and
/// before the optimizer is made. Modules that fully_shard() has sharded already, on this mesh or
/// another one, are left as they are. Throws as distribute_module() does; ShardingError for a
/// ShardTensor of another mesh, or one that is not replicated over `axes`; InvalidArgument for an
/// axis that the mesh does not have, one in `reshard_axes` that is not among `axes`, `reshard_axes`
/// of units that are not resharded, a pattern that matches nothing, a negative prefetch or
/// coalesce_bytes, a parameter without rows that shall stay, and for a precision that does not fit:
/// a dtype that is not floating-point, a complex or integer parameter in a unit with one (give the
/// unit another, or leave the parameter out by `ignore`), an output dtype without one to compute
/// in, or where a parameter already has that one; for an offload whose device is the CPU, or
/// another one than the manager's where both are of one type. NotAvailable for an offload from a
/// device that the mesh's group has no backend for. What one rank refuses is refused on all.
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
