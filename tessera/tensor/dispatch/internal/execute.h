#pragma once
// The kernel below autograd: finds or makes the plan of a call, redistributes what must move, runs
// the local call, and wraps the results.

#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "tessera/tensor/dispatch/internal/op_info.h"

namespace tessera::detail {

struct MeshContext;

void run_sharded(const OpInfo& info, torch::jit::Stack* stack);

/// A redistribution that an operator makes by itself.
struct ImplicitMove {
  /// Name of the argument.
  std::string name;
  ShardSpec from, to;
  std::int64_t element_size;
};
/// Applies Policies::redistribution to the moves between ranks: throws ImplicitRedistributionError,
/// or warns, on the mesh's first rank and once for each place in the program that calls the
/// operator, with the operator, its arguments, their placements, and the bytes that this rank
/// receives.
void check_implicit_moves(const std::string& op, const std::vector<ImplicitMove>& moves,
                          const MeshContext& context);

}  // namespace tessera::detail
