#include "tessera/partition/transfer.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::int64_t elements_of(const std::vector<Piece>& pieces) {
  std::int64_t n = 0;
  for (const Piece& piece : pieces) n += volume(piece.box);
  return n;
}

// Among the positions that hold the same box as `any` in `from`, the one that serves position
// `receiver` of `to`.
int source_for(const Sharding& from, const Sharding& to, int any, int receiver) {
  const int own = from.position(to.rank(receiver));
  const bool same_mesh = from.mesh() == to.mesh() && from.ranks() == to.ranks();
  int position = any, turn = receiver;
  int stride = 1;
  std::vector<int> strides(from.mesh().size());
  for (std::size_t axis = from.mesh().size(); axis-- > 0; stride *= from.mesh()[axis])
    strides[axis] = stride;
  for (int axis : from.free_axes()) {
    const int size = from.mesh()[axis];
    const int wanted = same_mesh ? from.coordinate(own, axis) : turn % size;
    turn /= size;
    position += (wanted - from.coordinate(any, axis)) * strides[axis];
  }
  return position;
}

}  // namespace

std::int64_t TransferPlan::sent() const { return elements_of(sends); }
std::int64_t TransferPlan::received() const { return elements_of(receives); }

TransferPlan transfer_plan(const Sharding& from, const Sharding& to, int rank) {
  if (from.shape() != to.shape())
    throw InvalidArgument("a transfer between arrays of different shapes, ", list(from.shape()),
                          " and ", list(to.shape()));
  TransferPlan plan;
  const int source = from.position(rank), target = to.position(rank);

  // The receiver's own box is divided along the source's boundaries; each piece comes from one
  // holder. Both sides enumerate the pieces of one receiver in the same order, that of the source's
  // positions.
  auto held_by = [&](int position, const Box& box) {
    if (position < 0) return false;
    const Box own = from.box(position);
    for (std::size_t d = 0; d < own.size(); ++d)
      if (!own[d].contains(box[d])) return false;
    return true;
  };
  if (target >= 0) {
    from.for_each_overlapping(to.box(target), [&](int position, const Box& box) {
      for (int axis : from.free_axes())
        if (from.coordinate(position, axis) != 0) return;  // one visit per box, not per holder
      if (held_by(source, box))
        plan.copies.push_back(box);
      else
        plan.receives.push_back({from.rank(source_for(from, to, position, target)), box});
    });
  }
  if (source >= 0) {
    to.for_each_overlapping(from.box(source), [&](int position, const Box& box) {
      const int receiver = to.rank(position);
      if (receiver == rank || held_by(from.position(receiver), box)) return;
      if (source_for(from, to, source, position) == source) plan.sends.push_back({receiver, box});
    });
    std::ranges::stable_sort(plan.sends, {}, &Piece::rank);
  }
  std::ranges::stable_sort(plan.receives, {}, &Piece::rank);
  return plan;
}

}  // namespace tessera
