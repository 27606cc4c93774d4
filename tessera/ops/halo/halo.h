#pragma once
// Halos: each rank gets, beside its own shard of a field, what it needs of the other ranks' shards;
// and the adjoint, which sums back.
//
// For users:
//   at::Tensor u = from_local(my_rows, mesh, {Shard(0)});  // 7 x 5 over 3 ranks: rows {3, 0, 4}
//   // plain; rank 0: 5 x 5 (a row of zeros, 3 rows, a row of rank 2)
//   at::Tensor h = halo_exchange(u, {{0, {1, 1, Edge::zero}}});
//   // a stencil: 3 x 5 on rank 0, 0 x 5 on rank 1, 4 x 5 on rank 2
//   at::Tensor d = h.slice(0, 2) - h.slice(0, 0, -2);
//   at::Tensor du = from_local(d, spec(u));  // sharded again; all of it differentiable
//
// For rules and other operators, below autograd:
//   // made once, kept with the plan: arithmetic alone
//   Halo halo(x_spec, edges, [&](int position) { return Box{...}; });
//   HaloValues values = halo.start_exchange(local);  // packed, one message per peer
//   ...what needs no halo...
//   values.arrival().wait();
//   // any box within the needed one; zeros where there is nothing
//   at::Tensor strip = values.assemble(box);
//   at::Tensor gradient = halo.sum(gradient_of_needed);  // the adjoint: <H x, y> = <x, H' y>

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/partition/halo.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// How boxes are sent: by a batch of sends and receives between ranks that need something of each
/// other, or by one all-to-all of the group. `automatic` uses the all-to-all if every rank of the
/// group has something for every other and there are at least four, else point-to-point.
enum class HaloMethod : unsigned char { automatic, point_to_point, all_to_all };

struct HaloOptions {
  /// Must be the same on all ranks.
  HaloMethod method = HaloMethod::automatic;
};

/// The box of a field, in global indices that may be outside the array, that the rank at each mesh
/// position (row-major) needs; a box without elements: nothing. Must be the same function on all
/// ranks.
using NeededBox = std::function<Box(int position)>;

class HaloValues;
namespace detail {
struct HaloState;
}  // namespace detail

/// The exchange that gives each rank its needed box of a field, prepared once: plan, group, and
/// buffers that are reused. A value; copies share one state. Calls on one Halo must be made in the
/// same order on all ranks of its group; several may be in progress.
class Halo {
 public:
  Halo() = default;
  /// `field` has no partial axis; `edges`: one per dim. Makes the group along the axes over which
  /// something is sent (all ranks of the mesh call it). Throws InvalidArgument if `field` is
  /// partial or the numbers of dims differ. Time grows with the number of positions of the mesh,
  /// not of elements.
  Halo(const ShardSpec& field, std::vector<Edge> edges, NeededBox needed, HaloOptions options = {});

  explicit operator bool() const { return state_ != nullptr; }
  const ShardSpec& field() const;
  const HaloPlan& plan() const;
  /// This rank's shard of the field.
  const Box& owned() const;
  /// The box that this rank needs.
  const Box& needed() const;
  /// True if any rank of the mesh sends; the same on all ranks. If false, nothing below
  /// communicates.
  bool travels() const;
  /// The method in use; point_to_point if nothing is sent.
  HaloMethod method() const;
  Group group() const;

  /// Starts the exchange. `local`: this rank's shard, of field().local_shape(), with any strides;
  /// it must keep its values until the messages have arrived.
  [[nodiscard]] HaloValues start_exchange(const at::Tensor& local) const;
  /// The needed box, contiguous, with zeros beyond zero edges: start, wait, assemble. Shares no
  /// memory with `local`.
  at::Tensor exchange(const at::Tensor& local) const;

  /// The adjoint: each element of `gradient`, of the needed box, is added to where its value came
  /// from. The result is a tensor of field().local_shape().
  Pending<at::Tensor> start_sum(const at::Tensor& gradient) const;
  at::Tensor sum(const at::Tensor& gradient) const;

 private:
  std::shared_ptr<detail::HaloState> state_;
};

/// This rank's shard of a field and its halo, which may still be on the way. Destroying it waits.
class HaloValues {
 public:
  /// Holds no values.
  HaloValues();
  HaloValues(HaloValues&&) noexcept;
  HaloValues& operator=(HaloValues&&) noexcept;
  ~HaloValues();
  /// The request for the messages. Throws InvalidArgument if nothing was started.
  Request& arrival();
  /// The values of `box`, in the same indices as needed(): those that are owned or needed, zeros
  /// elsewhere. Waits if the box is not owned. If one piece covers the box the result is a view of
  /// the local or of a buffer that lives as long as this object. Throws as arrival().
  at::Tensor assemble(const Box& box);

 private:
  friend class Halo;
  struct State;
  std::unique_ptr<State> state_;
};

/// Number of elements before and after a rank's shard of one dim, and the values beyond the array's
/// own edges.
struct HaloWidth {
  std::int64_t before = 0, after = 0;
  Edge edge = Edge::zero;
};
/// Widths by dim; a negative dim counts from the end. Dims that are not named have no halo; dims
/// that are not sharded get the edge's values.
using HaloWidths = std::map<int, HaloWidth>;

/// This rank's shard of a ShardTensor with its halo: a plain tensor whose extent in each dim is the
/// shard's plus before and after, also if the shard has no elements, so that a stencil needs no
/// special case. Widths may be larger than the shards; corners are included. Partial axes are
/// reduced first. Differentiable: the ranks' gradients are summed back to where the values came
/// from; as with to_local, ranks along axes that do not shard the tensor are assumed to compute the
/// same from it. Collective over the mesh, and so is its backward: the result must reach the loss
/// on every rank that takes part. Throws InvalidArgument for a plain tensor, a negative width, or a
/// dim out of range.
at::Tensor halo_exchange(const at::Tensor& tensor, const HaloWidths& widths,
                         const HaloOptions& options = {});

/// The general form: the box halo.needed(), as a plain tensor. `tensor` has the spec halo.field()
/// (it is redistributed if not). Differentiable; `gradient`: placements of the ranks' gradients, as
/// in to_local (Partial if ranks that hold the same shard compute different things from it).
at::Tensor halo_exchange(const at::Tensor& tensor, const Halo& halo,
                         const std::optional<std::vector<Placement>>& gradient = std::nullopt);

/// The Halo that halo_exchange() uses for a tensor of this spec and these widths, from the cache:
/// for looking at its plan.
Halo halo_of(const ShardSpec& field, const HaloWidths& widths, const HaloOptions& options = {});

}  // namespace tessera
