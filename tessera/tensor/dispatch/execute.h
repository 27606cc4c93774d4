#pragma once
// What the kernel below autograd does: find or make the plan of a call, redistribute what must
// move, run the local call, wrap the results.

#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "tessera/tensor/dispatch/op_info.h"

namespace tessera::detail {

struct MeshContext;

void run_sharded(const OpInfo& info, torch::jit::Stack* stack);

/// What an operator would redistribute by itself.
struct ImplicitMove {
  /// Of the argument.
  std::string name;
  ShardSpec from, to;
  std::int64_t element_size;
};
/// Applies Policies::redistribution to those that move shards: throws ImplicitRedistributionError,
/// or warns once for each place in the program that calls the operator, with the operator, its
/// arguments, their placements, and the bytes that this rank receives.
void check_implicit_moves(const std::string& op, const std::vector<ImplicitMove>& moves,
                          const MeshContext& context);

}  // namespace tessera::detail
