#pragma once
// What starts the teams of neighborhood_kernel.h on a GPU: compiled by CUDA's compiler, which sees
// nothing of libtorch.

#include "tessera/ops/attention/detail/neighborhood_kernel.h"

namespace tessera::detail {

enum class ElementType { float64, float32, float16, bfloat16 };

/// Launches on a stream (a cudaStream_t) of the current device: forward, one kernel; backward, one
/// for queries and one for keys. It waits for nothing, allocates nothing, and may be captured.
/// Returns why a kernel was not launched, or null.
const char* launch_forward(const NeighborhoodCall& call, ElementType type, void* stream);
const char* launch_backward(const NeighborhoodCall& call, ElementType type, void* stream);

}  // namespace tessera::detail
