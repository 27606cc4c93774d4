#pragma once
// Kernels that run in place of an operator's rule, on the sharded tensors themselves: for operators
// whose exchanges follow from values that all ranks have agreed on, which a rule never sees.

#include <ATen/core/stack.h>

#include <string>

#include "tessera/tensor/dispatch/internal/op_info.h"

namespace tessera::detail {

/// Takes the place of an operator's rule below autograd, for arguments that it knows: it replaces
/// the arguments on the stack by the results, and returns true. False: the rule is asked. What
/// decides is the same on all ranks.
using BeforeRule = bool (*)(const OpInfo& info, torch::jit::Stack* stack);

/// Registers such a function of an operator by its full name ("aten::index_add"). Process-wide,
/// like rules; call it before the first sharded tensor is made.
void register_before_rule(const std::string& name, BeforeRule function);

}  // namespace tessera::detail
