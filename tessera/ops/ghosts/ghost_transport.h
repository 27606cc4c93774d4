#pragma once
// A user's own exchange in the place of ours: the forward and reverse communication that a solver
// or an engine of molecular dynamics has already, over its own neighbours and buffers.
//
//   GhostTransport engine{.forward = [&](const at::Tensor& rows) { comm.forward(pointer(rows)); },
//                         .reverse = [&](const at::Tensor& rows) { comm.reverse(pointer(rows)); }};
//   GhostPlan plan = plan_over(engine, mesh, owned, needed);
//   at::Tensor h = ghost_exchange(plan, x);         // runs `forward`; its gradient `reverse`
//
// Both get one contiguous array, the owned rows and the ghosts behind them, as the plan has them
// (PETSc's local form of a ghosted vector, an engine's local and ghost atoms), and change it.

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <vector>

#include "tessera/ops/ghosts/ghost_plan.h"

namespace tessera {

struct GhostTransport {
  /// Fills the ghosts of `rows`, (owned + ghosts) x any dims, from their owners' rows. Called on
  /// every rank, also where it has no rows, on the thread of the call or of its backward.
  std::function<void(const at::Tensor& rows)> forward;
  /// Adds each ghost of `rows` to its owner's row. What it leaves in the ghosts is not read.
  std::function<void(const at::Tensor& rows)> reverse;
  /// What both can carry: other rows are refused.
  std::vector<at::ScalarType> dtypes = {at::kDouble};
};

/// The GhostPlan of these ids, as its constructor makes it, whose ghost_exchange() and sums of
/// ghost_reduce() go through `transport`, at once: nothing is in progress between start and wait.
/// min and max go as without it. The ids are kept.
///
/// At CheckLevel::collective each call is preceded by the same call on digits of ids, in the shape
/// and dtype of the rows: MismatchError on every rank, with ids and ranks, where what arrives is
/// not what the plan says. What a function throws is thrown on all ranks at that level; below it
/// the other ranks get PeerFailedError in their next call of the library, after they have returned
/// from their own function. A function that resizes what it is given has failed too.
///
/// Collective. Throws as GhostPlan, and InvalidArgument on every rank for a function or dtypes that
/// are missing or differ, and for dtypes that are not floating point, complex, int32 or int64.
/// Exchanges throw InvalidArgument for rows of another dtype.
GhostPlan plan_over(const GhostTransport& transport, const DeviceMesh& mesh,
                    std::span<const std::int64_t> owned, std::span<const std::int64_t> needed);
/// The ranks are this rank's group along some axes of the mesh, by their indices.
GhostPlan plan_over(const GhostTransport& transport, const DeviceMesh& mesh,
                    const std::vector<int>& axes, std::span<const std::int64_t> owned,
                    std::span<const std::int64_t> needed);

}  // namespace tessera
