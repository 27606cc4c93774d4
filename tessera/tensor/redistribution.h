#pragma once
// Redistribution gives a tensor other placements, other sizes of its shards, or another mesh; its
// value stays. It moves the fewest elements that the two specs allow, by the collective that needs
// the fewest rounds; explain_redistribution() lists the collectives.
//
//   at::Tensor columns = redistribute(rows, {Shard(1)});                       // all-to-all
//   Pending<at::Tensor> r = start_redistribute(rows, {Replicate()});   // all-gather, started
//   ...work that does not write to rows...
//   at::Tensor whole = r.wait();

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/pending.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// Returns the same value with `placements`: the tensor itself if they and the sizes are its own,
/// else one with memory of its own. A dim without sizes keeps its own if the same axes shard it,
/// and is sharded evenly otherwise. Collective over the axes whose placement changes.
/// Differentiable: the input's gradient has the placements `gradient`, by default those of the
/// input, Replicate for Partial. Throws InvalidArgument for a plain tensor and for what cannot be.
at::Tensor redistribute(const at::Tensor& tensor, const std::vector<Placement>& placements,
                        const ShardSizes& sizes = {},
                        const std::optional<std::vector<Placement>>& gradient = std::nullopt);
at::Tensor redistribute(const at::Tensor& tensor, const ShardSpec& spec);

/// Starts redistribute() and returns after its first collective has been started. `tensor` must not
/// be written to before wait() has returned. Differentiable like redistribute(); backward blocks.
/// All ranks must wait for their redistributions in the same order, because one that needs a second
/// collective (a reduction whose result is needed on other ranks) makes it in wait().
Pending<at::Tensor> start_redistribute(const at::Tensor& tensor, const ShardSpec& spec);
Pending<at::Tensor> start_redistribute(const at::Tensor& tensor,
                                       const std::vector<Placement>& placements,
                                       const ShardSizes& sizes = {});

/// Moves a tensor from one mesh to another, over the same or other ranks of one manager. Called by
/// every rank of either mesh: ranks outside `from` give an undefined tensor, ranks outside `to` get
/// one. A Partial value is reduced first; `placements` may not be Partial. Differentiable if both
/// meshes have the same ranks; otherwise a tensor that requires grad is refused on all ranks with
/// ShardingError. Throws InvalidArgument on all ranks if the ranks' tensors differ in placement,
/// shape or dtype, or are not on `from`.
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& from, const DeviceMesh& to,
                        const std::vector<Placement>& placements, const ShardSizes& sizes = {});

/// One collective of a redistribution, as seen by this rank.
struct RedistributionCall {
  /// Name of the collective, for example "reduce_scatter".
  std::string operation;
  /// The mesh axes whose ranks form the group.
  std::vector<std::string> axes;
  /// Number of elements received from other ranks; an all-reduce counts as a reduce-scatter and an
  /// all-gather.
  std::int64_t received = 0;
};
/// The collectives that redistributing `from` to `to` makes, in their order. Communicates nothing.
std::vector<RedistributionCall> explain_redistribution(const ShardSpec& from, const ShardSpec& to);

}  // namespace tessera
