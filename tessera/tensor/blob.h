#pragma once
// A solver's own memory as the local of a sharded tensor, without a copy: in row-major or
// column-major (Fortran) order, with ghost cells around the cells that the rank owns, or with
// strides. from_blob() of shard_tensor.h takes a local that fills its memory in row-major order.
//
//   // 2 ghost cells on either side of dim 1 and 2; the block of this rank is [5][ny + 4][nx + 4]
//   at::Tensor state = from_blob(block, spec,
//                                {.allocated = {5, ny + 4, nx + 4}, .before = {0, 2, 2}},
//                                at::kDouble);
//   // real(8) :: field(-1:nx+2, -1:ny+2)
//   at::Tensor field = from_blob(address, spec, {.order = MemoryOrder::column_major,
//                                                .allocated = {nx + 4, ny + 4}, .before = {2, 2}},
//                                at::kDouble);

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// Which dim of a block is contiguous in memory: the last one (C, C++), or the first one (Fortran).
enum class MemoryOrder : unsigned char { row_major, column_major };

/// Where in a block of memory a local lies. Sizes and cells may differ between ranks; the order,
/// and whether there are `allocated` sizes or `strides`, may not.
struct BlobMemory {
  MemoryOrder order = MemoryOrder::row_major;
  /// The sizes of the block, ghost cells included. Empty: the local fills it.
  std::vector<std::int64_t> allocated = {};
  /// Cells of the block before the local, in each dim. Empty: none.
  std::vector<std::int64_t> before = {};
  /// They count elements, for each dim, where the block is not as `order` and `allocated` say.
  std::vector<std::int64_t> strides = {};
};

/// Returns the tensor whose local on this rank is the part of `data`, the first element of a block,
/// that `memory` describes: what is written to either is seen in the other, and ghost cells are
/// neither read nor written. No communication. `data` must live as long as the tensor and what
/// shares memory with it; `deleter(data)` is called when the last of them is gone. Throws
/// InvalidArgument if the local does not fit into the block.
at::Tensor from_blob(void* data, const ShardSpec& spec, const BlobMemory& memory,
                     const at::TensorOptions& options = {},
                     const std::function<void(void*)>& deleter = {});

}  // namespace tessera
