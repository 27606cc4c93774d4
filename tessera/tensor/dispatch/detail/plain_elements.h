#pragma once
// Lists that an operator takes element by element, sharded tensors and plain ones mixed: those of
// an optimizer over a module of which a part is sharded.

#include <ATen/core/stack.h>

#include "tessera/tensor/dispatch/internal/op_info.h"

namespace tessera::detail {

/// For an operator on lists (aten::_foreach_add, aten::_fused_adamw_) and lists of which some
/// elements are plain tensors throughout, others not: calls it for the ones and for the others, so
/// that what is plain stays plain, leaves the results on the stack, and returns true. Otherwise,
/// and for every other operator, does nothing.
bool run_plain_elements_apart(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace tessera::detail
