#include "tessera/mesh/resize.h"

#include <algorithm>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {

int MeshResize::count(RankMove::Kind kind) const {
  return static_cast<int>(
      std::ranges::count_if(moves, [&](const RankMove& move) { return move.kind == kind; }));
}

namespace {

/// The new rank of each position of the old mesh, -1 where it is gone; `joined` gets those that
/// were not in it. Throws InvalidArgument if two say that they were one rank.
std::vector<int> survivors(const Mesh& old_mesh, const std::vector<int>& old_rank_of,
                           std::vector<int>& joined) {
  std::vector<int> survivor(old_mesh.size(), -1);  // new rank
  for (int r = 0; r < static_cast<int>(old_rank_of.size()); ++r) {
    const auto at = old_rank_of[r] < 0 ? std::nullopt : old_mesh.find(old_rank_of[r]);
    if (!at) {
      joined.push_back(r);
      continue;
    }
    if (survivor[*at] >= 0)
      throw InvalidArgument("new ranks ", survivor[*at], " and ", r,
                            " both say that they were old rank ", old_rank_of[r],
                            "; a process has one rank");
    survivor[*at] = r;
  }
  return survivor;
}

/// The index in the new mesh of each slice along the axis that is resized, -1 for one that is
/// dropped: those with the most ranks `alive` stay, at their index where the new mesh has it.
std::vector<int> slice_targets(const std::vector<int>& alive, int new_size) {
  const int old_size = static_cast<int>(alive.size());
  std::vector<int> kept = numbers_below(old_size);
  std::ranges::stable_sort(kept, [&](int a, int b) { return alive[a] > alive[b]; });
  if (old_size > new_size) kept.resize(new_size);
  std::vector<int> target(old_size, -1);  // of a slice: its index in the new mesh
  std::vector<bool> taken(new_size, false);
  // In order: those that stay at their index take it before the others look for a free one.
  std::ranges::sort(kept);
  for (int s : kept) {
    target[s] =
        s < new_size ? s : static_cast<int>(std::ranges::find(taken, false) - taken.begin());
    taken[target[s]] = true;
  }
  return target;
}

/// One of each new rank, then one of each that is gone.
std::vector<RankMove> moves(const Mesh& old_mesh, const Mesh& mesh,
                            const std::vector<int>& old_rank_of, const std::vector<int>& survivor) {
  std::vector<RankMove> result;
  for (int r = 0; r < mesh.size(); ++r) {
    RankMove move{RankMove::Kind::joined, -1, r, {}, mesh.coordinate(r)};
    if (old_rank_of[r] >= 0 && old_mesh.contains(old_rank_of[r])) {
      move.old_rank = old_rank_of[r];
      move.from = old_mesh.coordinate(move.old_rank);
      move.kind = move.from == move.to ? RankMove::Kind::kept : RankMove::Kind::moved;
    }
    result.push_back(std::move(move));
  }
  std::vector<int> gone;
  for (int p = 0; p < old_mesh.size(); ++p)
    if (survivor[p] < 0) gone.push_back(old_mesh.ranks()[p]);
  std::ranges::sort(gone);
  for (int rank : gone)
    result.push_back({RankMove::Kind::left, rank, -1, old_mesh.coordinate(rank), {}});
  return result;
}

}  // namespace

MeshResize resize_mesh(const Mesh& old_mesh, const std::string& axis,
                       const std::vector<int>& old_rank_of) {
  const int along = old_mesh.index(axis), old_size = old_mesh.size(along),
            slice = old_mesh.size() / old_size;
  const int world = static_cast<int>(old_rank_of.size());
  if (world < slice || world % slice != 0)
    throw WorldSizeMismatch(
        concat("a world of ", world, " ranks does not fit the mesh ", old_mesh, " with axis '",
               axis, "' resized: the other axes multiply to ", slice, "; use ",
               world / slice * slice > 0 ? concat(world / slice * slice, " or ") : "",
               (world / slice + 1) * slice, " ranks"),
        world, slice);
  const int new_size = world / slice;
  auto axes = old_mesh.axes();
  axes[along].size = new_size;

  std::vector<int> joined;
  const std::vector<int> survivor = survivors(old_mesh, old_rank_of, joined);
  const int stride = old_mesh.stride(along);
  const auto index_of = [&](int position) { return position / stride % old_size; };
  std::vector<int> alive(old_size, 0);
  for (int p = 0; p < old_mesh.size(); ++p) alive[index_of(p)] += survivor[p] >= 0;
  const std::vector<int> target = slice_targets(alive, new_size);

  // `stride` is that of the new mesh as well: the axes to the right are unchanged.
  const auto moved_to = [&](int position, int index) {
    return position / (stride * old_size) * stride * new_size + index * stride + position % stride;
  };
  std::vector<int> table(world, -1), homeless;
  for (int p = 0; p < old_mesh.size(); ++p) {
    if (survivor[p] < 0) continue;
    if (target[index_of(p)] < 0)
      homeless.push_back(p);
    else
      table[moved_to(p, target[index_of(p)])] = survivor[p];
  }
  std::vector<int> still;
  for (int p : homeless) {
    int hole = -1;
    for (int i = 0; i < new_size && hole < 0; ++i)
      if (table[moved_to(p, i)] < 0) hole = moved_to(p, i);
    if (hole < 0)
      still.push_back(p);
    else
      table[hole] = survivor[p];
  }
  int next = 0;
  const auto fill = [&](int rank) {
    while (table[next] >= 0) ++next;
    table[next] = rank;
  };
  for (int p : still) fill(survivor[p]);
  for (int rank : joined) fill(rank);

  const Mesh mesh(axes, table);
  return {mesh, moves(old_mesh, mesh, old_rank_of, survivor)};
}

}  // namespace tessera
