#pragma once
// What a sharded tensor can be made of.

#include "tessera/tensor/errors.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {

/// Throws InvalidArgument for an undefined or a sharded tensor, ShardingError for one that is not
/// dense; `call` is the function that was given it.
inline void require_plain(const at::Tensor& t, const char* call) {
  if (!t.defined()) throw InvalidArgument(call, ": the tensor is undefined");
  if (is_sharded(t))
    throw InvalidArgument(call, ": the tensor is itself a ShardTensor, ", spec(t),
                          ": tessera::redistribute() gives it other placements");
  if (t.layout() != c10::kStrided || t.is_quantized() || t.is_nested())
    throw ShardingError(
        "a ", t.toString(),
        " tensor cannot be sharded: sparse, quantized and nested tensors are not supported");
}

}  // namespace tessera::detail
