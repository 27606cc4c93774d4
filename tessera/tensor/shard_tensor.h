#pragma once
// Sharded tensors: ordinary at::Tensors whose value is spread over a mesh.
//
//   auto mesh = manager.mesh({{"data", 2}});
//   at::Tensor x = from_local(my_rows, mesh, {Shard(0)});  // any number of rows on each rank
//   at::Tensor w = distribute_tensor(weight, mesh, {Replicate()});
//   at::Tensor loss = x.matmul(w).square().mean();  // over all rows of all ranks
//   loss.backward();
//
// What is written as `placements` has one entry a mesh axis; `sizes` maps a sharded dim to the size
// of each part.

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

bool is_sharded(const at::Tensor& tensor);
/// Throws InvalidArgument for a plain tensor.
ShardSpec spec(const at::Tensor& tensor);
const std::vector<Placement>& placements(const at::Tensor& tensor);

/// The tensor whose parts are the ranks' `local`s. Shares the local's memory if that is contiguous.
/// Sizes of sharded dims: as given, else gathered once over the mesh. Throws InvalidArgument on
/// every rank that sees the ranks' shapes disagree. Differentiable.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                      const std::vector<Placement>& placements, const ShardSizes& sizes = {});
/// As above, without communication: the spec says it all.
at::Tensor from_local(const at::Tensor& local, const ShardSpec& spec);
/// A local in the caller's memory, row-major of spec.local_shape(); `deleter` is called once when
/// no tensor needs it any more.
at::Tensor from_blob(void* data, const ShardSpec& spec, const at::TensorOptions& options,
                     std::function<void(void*)> deleter = {});

/// Each rank cuts its part of `full`, which is the same on all ranks. No communication.
/// Differentiable: the gradient is the full one.
at::Tensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                             const std::vector<Placement>& placements,
                             const ShardSizes& sizes = {});
at::Tensor distribute_tensor(const at::Tensor& full, const ShardSpec& spec);
/// The ranks of mesh position `root` hold `full` (others may give an undefined tensor); every rank
/// gets its part.
at::Tensor scatter(const at::Tensor& full, const DeviceMesh& mesh,
                   const std::vector<Placement>& placements, const ShardSizes& sizes = {},
                   int root = 0);

/// This rank's part; shares its memory. Differentiable: the ranks' gradients are parts of a
/// gradient with `gradient` placements (default: the tensor's own, Replicate where that is
/// Partial).
at::Tensor to_local(const at::Tensor& tensor,
                    const std::optional<std::vector<Placement>>& gradient = std::nullopt);
/// The whole value on every rank. Differentiable: the ranks' gradients lie as `gradient` says,
/// Replicate (default: every rank computes the same from it) or Partial (each rank's loss is a term
/// of the whole one).
at::Tensor full_tensor(const at::Tensor& tensor,
                       const std::optional<std::vector<Placement>>& gradient = std::nullopt);

at::Tensor empty(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor zeros(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor ones(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor full(const ShardSpec& spec, const at::Scalar& value,
                const at::TensorOptions& options = {});
/// 0, 1, ..., n - 1 of a one-dimensional spec; start, start + step, ...
at::Tensor arange(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor arange(const ShardSpec& spec, const at::Scalar& start, const at::Scalar& step,
                  const at::TensorOptions& options = {});
/// Uniform in [0, 1), and standard normal: the same numbers whatever the placement, see
/// manual_seed().
at::Tensor rand(const ShardSpec& spec, const at::TensorOptions& options = {});
at::Tensor randn(const ShardSpec& spec, const at::TensorOptions& options = {});

/// "ShardTensor float [4, 7] data=Shard(0)[3, 1], local [1, 7] at [3, 0]".
std::string summary(const at::Tensor& tensor);
/// Summary and, gathered, the value. Collective.
void print(const at::Tensor& tensor);

}  // namespace tessera
