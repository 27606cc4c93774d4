#pragma once
// Dry runs: the results of an operator, and whether it accepts its arguments, determined without
// values. All that they look at is known to all ranks, so that an error is thrown on every rank,
// before anything is sent.

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "tessera/tensor/dispatch/internal/op_info.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// The outputs, as OpCall::outputs() returns them. nullopt: the operator has no meta kernel for the
/// arguments.
std::optional<std::vector<OutputInfo>> infer_outputs(const OpInfo& info,
                                                     const std::vector<c10::IValue>& arguments,
                                                     const std::vector<TensorInfo>& tensors);

/// Throws what the operator throws for tensors and numbers of these dtypes, which meta kernels do
/// not check: it is run on small tensors, and an error counts if other dtypes in their place make
/// it go away (otherwise the shapes were to blame). Does nothing for devices other than the CPU,
/// for random operators that take no generator, and for operators that are not libtorch's own.
void require_dtypes(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                    const std::vector<TensorInfo>& tensors, c10::Device device);

}  // namespace tessera::detail
