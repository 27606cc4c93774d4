#pragma once
// Redistribution: the same value in other placements, in other parts, on another mesh. What moves
// is the least that the two specs allow, by the call that needs the fewest rounds; see
// explain_redistribution().
//
//   at::Tensor columns = redistribute(rows, {Shard(1)});                       // all-to-all
//   RedistributeRequest r = redistribute_async(rows, {Replicate()});  // all-gather, started
//   ...work that does not write to rows...
//   at::Tensor whole = r.wait();

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera {

namespace detail {
class Redistribution;
}

/// `sizes` of sharded dims: as given, else kept where the same axes shard the dim, else even. The
/// result has memory of its own. Differentiable: the input's gradient gets the input's placements
/// (Replicate where that is Partial), or those of `gradient`.
at::Tensor redistribute(const at::Tensor& tensor, const std::vector<Placement>& placements,
                        const ShardSizes& sizes = {},
                        const std::optional<std::vector<Placement>>& gradient = std::nullopt);
at::Tensor redistribute(const at::Tensor& tensor, const ShardSpec& spec);

/// A redistribution under way. Destroying one that was not waited for waits for its call and drops
/// the result.
class RedistributeRequest {
 public:
  RedistributeRequest(at::Tensor tensor, const ShardSpec& to);
  /// wait() would not block.
  bool done() const;
  /// The result; once. Differentiable as redistribute(); its backward is not asynchronous. All
  /// ranks wait for their requests in the same order: a redistribution that needs a second call (a
  /// reduction whose result lies elsewhere) makes it here. Throws Error if called again.
  at::Tensor wait();

 private:
  at::Tensor tensor_;
  ShardSpec to_;
  std::shared_ptr<detail::Redistribution> run_;
};
/// Starts the first call, and returns. `tensor` must not be written to before wait() has returned.
RedistributeRequest redistribute_async(const at::Tensor& tensor, const ShardSpec& spec);
RedistributeRequest redistribute_async(const at::Tensor& tensor,
                                       const std::vector<Placement>& placements,
                                       const ShardSizes& sizes = {});

/// From one mesh to another, of the same or other ranks of one manager: called by every rank of
/// either. Ranks outside `from` give an undefined tensor, ranks outside `to` get one. A partial
/// value is reduced first; `placements` may not be partial. Differentiable where both meshes have
/// the same ranks; else a tensor that requires grad is refused on all ranks, with ShardingError.
/// Throws InvalidArgument on all ranks if the tensors given do not lie on `from` alike.
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& from, const DeviceMesh& to,
                        const std::vector<Placement>& placements, const ShardSizes& sizes = {});

/// What redistributing does on this rank, one call after the other, without doing it.
struct RedistributionCall {
  /// "reduce_scatter"
  std::string operation;
  /// Of the group.
  std::vector<std::string> axes;
  /// Elements from other ranks; an all-reduce counts as reduce-scatter and all-gather.
  std::int64_t received = 0;
};
std::vector<RedistributionCall> explain_redistribution(const ShardSpec& from, const ShardSpec& to);

}  // namespace tessera
