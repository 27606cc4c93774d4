#pragma once
// Reductions of small tensors over ranks, within a rule's local function.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

/// The mesh axes that shard a dim.
inline std::vector<int> axes_that_shard(const ShardSpec& spec, int dim) {
  return spec.dims() > 0 ? spec.dim(dim).axes : std::vector<int>();
}

/// Returns the axes on which `out` would be Partial, and makes it replicated there, because the
/// local function reduces over them itself.
inline std::vector<int> reduce_inside(Plan::Output& out) {
  std::vector<int> axes;
  auto placements = out.spec.placements();
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!placements[a].is_partial()) continue;
    axes.push_back(static_cast<int>(a));
    placements[a] = Replicate();
  }
  out.spec = out.spec.with_placements(placements);
  return axes;
}

/// Reduces a tensor over the ranks of some mesh axes; every rank gets the result, in a tensor of
/// its own or, if there are no axes, the one given.
struct OverRanks {
  std::shared_ptr<MeshContext> context;
  std::vector<int> axes;
  /// Name of the calls in traces and errors.
  const char* name;

  at::Tensor operator()(const at::Tensor& t, ReduceOp op = ReduceOp::sum) const {
    at::Tensor all = t.contiguous();
    if (!axes.empty()) context->mesh.group(axes).all_reduce(all, op, {.name = name});
    return all;
  }
};

}  // namespace tessera::detail
