#pragma once
// Ghosts of arrays that are divided by a table of owners: nodes of a graph, cells of an
// unstructured mesh, particles, in the partition that a solver has already.
//
//   // rank 0 owns ids {7, 2, 9} and needs {4}; rank 1 owns {4} and needs {9, 7}; rank 2: nothing
//   GhostPlan plan(mesh, owned, needed);            // collective, once for each partition
//   at::Tensor h = ghost_exchange(plan, x);         // rank 0: rows 7 2 9 | 4; rank 1: 4 | 9 7
//   at::Tensor m = messages(h, edges);              // edges in rows of h: local_rows()
//   at::Tensor y = ghost_reduce(plan, m);           // rank 0: rows 7 2 9, ghosts' values added
//
// The two are each other's adjoint, <ghost_exchange(x), y> = <x, ghost_reduce(y)>, and each is the
// gradient of the other: they can be differentiated any number of times, as forces that are
// gradients of a learnt energy need. (PETSc's users know them as VecGhostUpdate forward and
// reverse, Tpetra's as Import, and Export with ADD.)
//
// Tensors are plain ones of this rank alone: rows along dim 0, any dims behind it, any strides. The
// gradient of a loss per rank is that of the sum of the ranks' losses (Cotangent::summed, see
// functional.h). Backward is collective: on every rank the input must require a gradient or on
// none, also where it has no rows, and the result must reach the rank's loss.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group/pending.h"
#include "tessera/comm/group/types.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/partition/ghosts.h"

namespace tessera {

namespace detail {
struct GhostState;
}  // namespace detail

/// Who sends which rows to whom, agreed once by the ranks of a group. A value; copies share one
/// state. Exchanges of one plan must be started in the same order on all its ranks; several may be
/// in progress.
class GhostPlan {
 public:
  GhostPlan() = default;
  /// The ranks are all of the mesh. `owned`: this rank's ids in the order of its rows; each id of
  /// the array is owned by one rank, in any way, and a rank may own none. `needed`: the ids of its
  /// ghosts in the order in which they stand behind the owned rows; an id may be named more than
  /// once. Ids are at least 0 and need not be consecutive. The ids are not kept. Collective. Throws
  /// InvalidArgument on every rank, with ids and ranks, as plan_ghosts() does.
  GhostPlan(const DeviceMesh& mesh, std::span<const std::int64_t> owned,
            std::span<const std::int64_t> needed);
  /// The ranks are this rank's group along some axes of the mesh, by their indices.
  GhostPlan(const DeviceMesh& mesh, const std::vector<int>& axes,
            std::span<const std::int64_t> owned, std::span<const std::int64_t> needed);

  explicit operator bool() const { return state_ != nullptr; }
  /// What this rank sends and receives. Ranks are those of group().
  const GhostRows& rows() const;
  /// Looked up at each use: after a failure that all ranks have caught it is made anew.
  Group group() const;
  /// GhostRows::summary().
  std::string summary() const;

  const std::shared_ptr<detail::GhostState>& state() const { return state_; }

 private:
  std::shared_ptr<detail::GhostState> state_;
};

/// This rank's owned rows followed by its ghosts, which come from their owners: (owned + ghosts) x
/// any dims. `owned` has one row for each owned id. Any dtype. The result shares no memory with it.
///
/// Bytes on the wire are ghost rows x bytes of a row. Throws InvalidArgument if `owned` has another
/// number of rows than the plan, is a ShardTensor or has no dims: on every rank at
/// CheckLevel::collective, where plan, dtype and dims are compared as well; below that the other
/// ranks of the mesh throw PeerFailedError and can go on.
at::Tensor ghost_exchange(const GhostPlan& plan, const at::Tensor& owned);
/// Starts ghost_exchange() and returns at once. The owned rows can be read, and not be written to,
/// before wait() has returned; all ranks wait for theirs in the same order. Differentiable;
/// backward blocks.
Pending<at::Tensor> start_ghost_exchange(const GhostPlan& plan, const at::Tensor& owned);

/// The owned rows, into each of which the rows of its ghosts on other ranks are reduced: owned x
/// any dims. `rows` has one row for each owned id and each ghost. `op`: sum, min or max. On the CPU
/// the order is fixed, so that results are equal to the bit from run to run: the owned row first,
/// then the ranks in ascending order, and the ghosts of a rank in its order. Half precision is
/// reduced in float32 and rounded once.
///
/// The gradient of min and max goes to the rows that have the extreme value, in equal shares.
/// Throws as ghost_exchange(), and for another `op`, booleans, and min and max of complex numbers.
at::Tensor ghost_reduce(const GhostPlan& plan, const at::Tensor& rows, ReduceOp op = ReduceOp::sum);
/// Starts ghost_reduce(), as start_ghost_exchange().
Pending<at::Tensor> start_ghost_reduce(const GhostPlan& plan, const at::Tensor& rows,
                                       ReduceOp op = ReduceOp::sum);

}  // namespace tessera
