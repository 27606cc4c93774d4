#pragma once
// The entry into the dispatcher: the kernels of sharded tensors, registered for every operator.

#include <ATen/core/stack.h>

#include <string>

namespace tessera::detail {

/// Takes the place of an operator above autograd, for arguments that it knows: it replaces the
/// arguments on the stack, which have been cast and promoted, by the results, and returns true.
/// False: the operator runs as any other. Not called in inference mode.
using AboveFunction = bool (*)(torch::jit::Stack* stack);

/// Registers such a function of an operator by its full name ("aten::embedding"). Process-wide,
/// like rules; call it before the first sharded tensor is made.
void register_above(const std::string& name, AboveFunction function);

/// Registers the kernels on first use, and those of operators defined since. Called wherever a
/// sharded tensor is made. Throws NotAvailable if another library uses the dispatch key.
void ensure_registered();

}  // namespace tessera::detail
