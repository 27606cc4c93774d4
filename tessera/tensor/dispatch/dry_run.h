#pragma once
// Dry runs: what an operator makes of tensors, and whether it takes them, found without their
// values. All that they look at is known to all ranks, so that what they throw is thrown on every
// rank, before anything is sent.

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "tessera/tensor/dispatch/op_info.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// What OpCall::outputs() gives. Empty optional: the operator has no meta kernel for the arguments.
std::optional<std::vector<OutputInfo>> infer_outputs(const OpInfo& info,
                                                     const std::vector<c10::IValue>& arguments,
                                                     const std::vector<TensorInfo>& tensors);

/// Throws what the operator throws for tensors and numbers of these dtypes, which meta kernels do
/// not look at: it is run on small tensors, and an error counts if others in their place make it go
/// away (otherwise the shapes were to blame). Does nothing for devices but the CPU, for random
/// operators that take no generator, and for operators that are not libtorch's own.
void require_dtypes(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                    const std::vector<TensorInfo>& tensors, c10::Device device);

}  // namespace tessera::detail
