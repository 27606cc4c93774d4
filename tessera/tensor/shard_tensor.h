#pragma once
// Sharded tensors: ordinary at::Tensors whose value is spread over a mesh.
//
//   auto mesh = manager.mesh({{"data", 2}});
//   at::Tensor x = from_local(my_rows, mesh, {Shard(0)});  // any number of rows on each rank
//   at::Tensor w = distribute_tensor(weight, mesh, {Replicate()});
//   at::Tensor loss = x.matmul(w).square().mean();  // over all rows of all ranks
//   loss.backward();
//
// `placements` has one entry per mesh axis; `sizes` maps a sharded dim to the size of each shard.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/spec/placement.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// False for plain and undefined tensors.
bool is_sharded(const at::Tensor& tensor);
/// The spec of a sharded tensor: where its elements are. Throws InvalidArgument for a plain tensor.
ShardSpec spec(const at::Tensor& tensor);
/// spec(tensor).placements(). Throws InvalidArgument for a plain tensor.
const std::vector<Placement>& placements(const at::Tensor& tensor);

/// Makes the sharded tensor whose shards are the ranks' `local`s. Shares the local's memory if that
/// is contiguous. Sizes of sharded dims that are not given are gathered over the mesh. If all are
/// given, the first call with these placements, sizes, dtype and requires_grad compares the ranks'
/// locals (a rank that differed would later call other collectives than its peers), and later calls
/// do not communicate. Differentiable: with Partial, the local's gradient is that of the total for
/// a sum, divided by n for a mean over n ranks, multiplied by the other ranks' factors for a
/// product, and its share for an extremum. Throws InvalidArgument on every rank if the ranks
/// disagree.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                      const std::vector<Placement>& placements, const ShardSizes& sizes = {});
/// Nothing is communicated: the spec is complete, and the caller guarantees that dtype and
/// requires_grad are the same on all ranks.
at::Tensor from_local(const at::Tensor& local, const ShardSpec& spec);
/// Makes a sharded tensor over the caller's memory, which holds the local row-major with the shape
/// spec.local_shape(). `deleter` is called once, when no tensor needs the memory any more.
at::Tensor from_blob(void* data, const ShardSpec& spec, const at::TensorOptions& options,
                     std::function<void(void*)> deleter = {});

/// Makes a sharded tensor of `full`, which must be the same on all ranks: each rank takes its shard
/// of it, and nothing is sent. Differentiable: `full` gets the full gradient. Throws
/// InvalidArgument if placements or sizes do not fit the shape.
at::Tensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                             const std::vector<Placement>& placements,
                             const ShardSizes& sizes = {});
at::Tensor distribute_tensor(const at::Tensor& full, const ShardSpec& spec);
/// Makes a sharded tensor of `full`, which only the rank at mesh position `root` holds (others may
/// give an undefined tensor). Collective. Throws InvalidArgument for a root that the mesh does not
/// have and for placements or sizes that do not fit, MismatchError for roots that differ by rank.
at::Tensor scatter(const at::Tensor& full, const DeviceMesh& mesh,
                   const std::vector<Placement>& placements, const ShardSizes& sizes = {},
                   int root = 0);

/// Returns this rank's local, which shares its memory with the tensor; for a view that had to be
/// gathered (one row of a sharded dim), and so has memory of its own, a copy. Differentiable: the
/// ranks' gradients are the locals of a gradient with the placements `gradient` (by default the
/// tensor's, with Replicate in place of Partial). Throws InvalidArgument for a plain tensor.
at::Tensor to_local(const at::Tensor& tensor,
                    const std::optional<std::vector<Placement>>& gradient = std::nullopt);
/// Returns the global value on every rank, as a plain tensor with memory of its own. Collective.
/// Differentiable: with `gradient` Replicate (the default) every rank computes the same from the
/// value, and its gradient counts once; with Partial the total loss is the sum of the ranks'
/// losses, and gradients are summed.
at::Tensor full_tensor(const at::Tensor& tensor,
                       const std::optional<std::vector<Placement>>& gradient = std::nullopt);

/// Makes a new tensor of a spec. No communication. Throws InvalidArgument if the spec is Partial,
/// except for empty() and zeros().
at::Tensor empty(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor zeros(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor ones(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor full(const ShardSpec& spec, const at::Scalar& value,
                const at::TensorOptions& options = {});
/// 0, 1, ..., n - 1, or start, start + step, ..., for a spec of one dim. Throws InvalidArgument for
/// any other number of dims.
at::Tensor arange(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor arange(const ShardSpec& spec, const at::Scalar& start, const at::Scalar& step,
                  const at::TensorOptions& options = {});
/// Uniform in [0, 1), and standard normal. The numbers depend on the global index alone, so that
/// they are the same for any placement; manual_seed() restarts them.
at::Tensor rand(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor randn(const ShardSpec& spec, const at::TensorOptions& options = {});

/// Describes a tensor in one line, without communication: "ShardTensor float [4, 7]
/// data=Shard(0)[3, 1], local [1, 7] at [3, 0]".
std::string summary(const at::Tensor& tensor);
/// Prints summary() and the gathered value on the first rank of the mesh. Collective.
void print(const at::Tensor& tensor);

}  // namespace tessera
