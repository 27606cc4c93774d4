#pragma once
// What the kernel below autograd does: find or make the plan of a call, redistribute what must move, run the local call, wrap the results.

#include <ATen/core/stack.h>

#include "tessera/tensor/detail/op_info.h"

namespace tessera::detail {

void run_sharded(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace tessera::detail
