#pragma once
// From what a loader reads to sharded tensors, in one call.
//
//   // data 2 x domain 2; each rank reads its rows of the batch, with complete fields, and keeps
//   // its shard of them; .whole = false where it reads its own shard of every field alone
//   for (auto& loaded : loader.epoch()) {
//     const auto batch =
//         shard_batch(loaded, mesh, {"data"}, {{.dims = {{"domain", 2}}, .whole = true}, {}});
//     torch::mse_loss(net(batch.tensors[0]), batch.tensors[1]).backward();
//   }
//
//   // the same with names, which a dataset gives; a group's name stands for all of its fields
//   const auto batch = shard_batch(loaded, mesh, {"data"},
//                                  {{.field = "inputs", .dims = {{"domain", 2}}, .whole = true}});
//   net(batch.field("inputs/wind"), batch.field("inputs/heights"))
//
//   // one rank of each domain group reads whole samples, the others get their shards of them
//   auto batch = scatter_batch(reads ? std::optional(loader->next()) : std::nullopt, mesh,
//                              {"data"}, {{.dims = {{"domain", 2}}}});
//
//   // each rank has read its shard of every sample, and a function of complete samples flips them
//   batch = augment_batch(batch, loaded.samples, {.function = flip, .seed = 7});

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/dataset.h"
#include "tessera/data/loader.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// How one tensor of a batch lies along the axes that do not shard the batch: replicated, unless
/// `dims` names a dim. Dims count with the batch, which is dim 0.
struct FieldSharding {
  /// Which tensors of a batch with names: the one of that name, or all of a group. Empty: the one
  /// at this place in the list.
  std::string field = {};
  std::map<std::string, int> dims = {};
  /// The sizes of the shards of the dims that are sharded. If they are not given, shard_batch()
  /// gathers those that the ranks have read; scatter_batch(), and shard_batch() of a tensor that
  /// has been read whole, shard evenly.
  ShardSizes sizes = {};
  /// What each rank has read, which shard_batch() must be told where there are dims. True: the
  /// complete tensor in those dims, of which it keeps its shard. False: its own shard alone.
  /// scatter_batch() takes complete tensors and asks for nothing.
  std::optional<bool> whole = {};
};

/// A global batch as sharded tensors. Its mask is sharded likewise, and undefined on all ranks if
/// all rows are real; `rows` and `real` count the global batch. Ranks that have read nothing have
/// the names too.
using ShardedBatch = TensorBatch;

/// The batch with dim 0 sharded over `batch_axes` and the tensors' other dims as `fields` say: one
/// entry for each tensor, or one for all, or none; or entries that name their fields, the others
/// being replicated. `batch_axes` are those of the loader's mapping.
/// Communicates where sizes are gathered, and as from_local() does. Throws InvalidArgument for axes
/// that the mesh lacks or that stand in another order than its own, for a batch that was loaded for
/// other axes or by a process of several devices, for names that the batch lacks or that two
/// entries share, for dims without `whole`, and where numbers or dims do not fit.
ShardedBatch shard_batch(const LoadedBatch& batch, const DeviceMesh& mesh,
                         const std::vector<std::string>& batch_axes,
                         const std::vector<FieldSharding>& fields = {});

/// The same of rows that no loader has dealt: each batch coordinate gives any number of them, none
/// too, and they are counted by one small all-gather. Collective over the mesh; throws on all of
/// its ranks, also where ranks with one batch coordinate give other numbers of rows.
ShardedBatch shard_rows(const TensorBatch& batch, const DeviceMesh& mesh,
                        const std::vector<std::string>& batch_axes,
                        const std::vector<FieldSharding>& fields = {});

/// The same where one rank alone has read for all that share its batch coordinate: the one at
/// coordinate 0 of the other axes, which gives the batch. The others give nothing, and need no
/// loader; or one without tensors (LoaderOptions::reads), of which the numbers of rows are
/// compared. Collective over the mesh. Throws as shard_batch(), on all of its ranks.
ShardedBatch scatter_batch(const std::optional<LoadedBatch>& batch, const DeviceMesh& mesh,
                           const std::vector<std::string>& batch_axes,
                           const std::vector<FieldSharding>& fields = {});
/// The same of rows that no loader has dealt.
ShardedBatch scatter_rows(const std::optional<TensorBatch>& batch, const DeviceMesh& mesh,
                          const std::vector<std::string>& batch_axes,
                          const std::vector<FieldSharding>& fields = {});

/// True if this rank is one that reads for scatter_batch().
bool reads_for_others(const DeviceMesh& mesh, const std::vector<std::string>& batch_axes);

/// The batch with each sample as the function makes it, wherever its fields are sharded: rows are
/// dealt to the ranks, the function sees complete samples, and the results lie as the batch did.
/// Bit by bit what LoaderOptions::augment makes of samples that are read complete, which moves
/// nothing and is to be preferred there; this sends every field twice. `samples`:
/// LoadedBatch::samples of the rows that this rank has read. A sharded dim that the function
/// changes is sharded evenly. Collective over the mesh. Throws on all of its ranks: an Error for
/// what the function throws, with the sample's number; InvalidArgument for plain tensors, other
/// numbers of samples, and results that do not fit together.
ShardedBatch augment_batch(const ShardedBatch& batch, const std::vector<SampleRef>& samples,
                           const Augmentation& by);

}  // namespace tessera
