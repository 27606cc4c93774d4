#pragma once
// What this rank holds of a state: descriptions, which all ranks exchange, and the bytes behind
// them.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/checkpoint/state.h"
#include "tessera/checkpoint/storage/detail/write_plan.h"

namespace tessera::detail {

/// Global shape and this rank's box of a tensor of the state, and its layout as JSON (empty for
/// plain tensors). Throws InvalidArgument for dtypes that the format does not have, and for tensors
/// that are not dense.
HeldShard describe(const CheckpointState::Tensor& tensor);
/// Of everything in the state: tensors, values, this rank's values.
std::vector<HeldShard> describe(const CheckpointState& state, int rank);

/// Throws InvalidArgument for a tensor whose elements do not lie in memory one by one: sparse,
/// nested, without data.
void need_dense(const std::string& name, const at::Tensor& tensor);

/// The bytes of the plain tensors, undefined for sharded ones: contiguous, on the CPU. Shares
/// memory where it can.
std::vector<at::Tensor> plain_bytes(const CheckpointState& state);
/// The bytes of the described, in the same order, of the box. `plain`: what plain_bytes() gave, or
/// nothing. Collective over the meshes of partial tensors, which are reduced.
std::vector<at::Tensor> local_bytes(const CheckpointState& state,
                                    const std::vector<at::Tensor>& plain);

/// Where `box` begins in the row-major bytes of `held`; it is contiguous there.
std::size_t offset_in(const Box& held, const Box& box, std::size_t element);

}  // namespace tessera::detail
