#include "tessera/tensor/spec/detail/redistribution_plan.h"

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {
namespace {

using Axes = std::vector<int>;

bool has(const Axes& axes, int axis) { return std::ranges::find(axes, axis) != axes.end(); }

// Calls visit(coordinate) for every combination of coordinates of `axes`, row-major, the others as
// in `coordinate`.
template <class Visit>
void for_each_coordinate(const std::vector<int>& mesh, const Axes& axes,
                         std::vector<int> coordinate, Visit visit) {
  std::size_t n = 1;
  for (const int a : axes) n *= mesh[a];
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t rest = i;
    for (std::size_t k = axes.size(); k-- > 0;) {
      coordinate[axes[k]] = static_cast<int>(rest % mesh[axes[k]]);
      rest /= mesh[axes[k]];
    }
    visit(coordinate);
  }
}

int part_of(const std::vector<int>& mesh, const DimSharding& d,
            const std::vector<int>& coordinate) {
  int part = 0;
  for (const int a : d.axes) part = part * mesh[a] + coordinate[a];
  return part;
}

Interval interval_of(const std::vector<int>& mesh, const DimSharding& d, std::int64_t extent,
                     const std::vector<int>& coordinate) {
  return d.axes.empty() ? Interval{0, extent} : d.partition.interval(part_of(mesh, d, coordinate));
}

Axes sorted_union(const Axes& a, const Axes& b) {
  Axes all = a;
  for (const int axis : b)
    if (!has(all, axis)) all.push_back(axis);
  std::ranges::sort(all);
  return all;
}

// A layout during planning: how each dim is sharded, axes in any order.
struct ShardedDims {
  const std::vector<std::int64_t>& shape;
  const std::vector<int>& mesh;
  std::vector<DimSharding> dims;

  Box box(const std::vector<int>& coordinate) const {
    Box b(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d)
      b[d] = interval_of(mesh, dims[d], shape[d], coordinate);
    return b;
  }
  bool sharded_by(int axis) const { return dim_of(axis) >= 0; }
  int dim_of(int axis) const {
    for (std::size_t d = 0; d < dims.size(); ++d)
      if (has(dims[d].axes, axis)) return static_cast<int>(d);
    return -1;
  }
  Sharding sharding() const { return Sharding(shape, mesh, dims); }
  // The dim with the longest shards, which can be sharded further most evenly; -1 for a scalar.
  int longest() const {
    int best = -1;
    double longest = -1;
    for (std::size_t d = 0; d < dims.size(); ++d) {
      double length = static_cast<double>(shape[d]);
      for (const int a : dims[d].axes) length /= mesh[a];
      if (length > longest) {
        longest = length;
        best = static_cast<int>(d);
      }
    }
    return best;
  }
};

// `base` sharded further by `extra`, innermost: along the borders of `like` if those follow from
// the coordinates, else evenly.
DimSharding refine(const std::vector<int>& mesh, const DimSharding& base, std::int64_t extent,
                   const Axes& extra, const DimSharding& like) {
  if (extra.empty()) return base;
  DimSharding fine;
  fine.axes = base.axes;
  fine.axes.insert(fine.axes.end(), extra.begin(), extra.end());
  bool known = false;
  for (const int a : extra) known |= has(like.axes, a);
  for (const int a : like.axes) known &= has(fine.axes, a) || mesh[a] == 1;
  int inner = 1;
  for (const int a : extra) inner *= mesh[a];
  std::vector<std::int64_t> sizes;
  for_each_coordinate(
      mesh, base.axes, std::vector<int>(mesh.size()), [&](const std::vector<int>& outer) {
        const Interval all = interval_of(mesh, base, extent, outer);
        std::vector<std::int64_t> begins;
        int i = 0;
        for_each_coordinate(mesh, extra, outer, [&](const std::vector<int>& coordinate) {
          const std::int64_t even =
              all.begin + all.size() / inner * i + std::min<std::int64_t>(i, all.size() % inner);
          const std::int64_t wanted =
              known ? std::clamp(interval_of(mesh, like, extent, coordinate).begin, all.begin,
                                 all.end)
                    : even;
          begins.push_back(i == 0 ? all.begin : std::max(wanted, begins.back()));
          ++i;
        });
        for (std::size_t k = 0; k < begins.size(); ++k)
          sizes.push_back((k + 1 < begins.size() ? begins[k + 1] : all.end) - begins[k]);
      });
  fine.partition = Partition(std::span<const std::int64_t>(sizes));
  return fine;
}

// True if every rank's box of `inner` is within its box of `outer`.
bool contained(const ShardedDims& inner, const ShardedDims& outer) {
  for (std::size_t d = 0; d < inner.shape.size(); ++d) {
    bool in = true;
    for_each_coordinate(
        inner.mesh, sorted_union(inner.dims[d].axes, outer.dims[d].axes),
        std::vector<int>(inner.mesh.size()), [&](const auto& c) {
          in = in && interval_of(outer.mesh, outer.dims[d], outer.shape[d], c)
                         .contains(interval_of(inner.mesh, inner.dims[d], inner.shape[d], c));
        });
    if (!in) return false;
  }
  return true;
}

// True if every rank has all that it is to have, of what is sharded another way: where one rank has
// everything, along whichever dim the others have nothing.
bool all_stays(const ShardedDims& from, const ShardedDims& to) {
  Axes axes;
  for (std::size_t d = 0; d < from.dims.size(); ++d)
    axes = sorted_union(axes, sorted_union(from.dims[d].axes, to.dims[d].axes));
  bool stays = true;
  for_each_coordinate(from.mesh, axes, std::vector<int>(from.mesh.size()),
                      [&](const std::vector<int>& c) {
                        if (!stays) return;
                        const Box has = from.box(c), wanted = to.box(c);
                        if (volume(wanted) == 0) return;
                        for (std::size_t d = 0; d < has.size(); ++d)
                          stays = stays && has[d].contains(wanted[d]);
                      });
  return stays;
}

// True if the shards of `from`, over the axes that `to` drops, tile every rank's shard of `to`:
// then the move is an all-gather over those axes.
bool gathers(const ShardedDims& from, const ShardedDims& to, Axes& over) {
  over.clear();
  for (std::size_t d = 0; d < from.shape.size(); ++d) {
    Axes dropped;
    for (const int a : to.dims[d].axes)
      if (!has(from.dims[d].axes, a)) return false;
    for (const int a : from.dims[d].axes)
      if (!has(to.dims[d].axes, a)) dropped.push_back(a);
    std::ranges::sort(dropped);
    bool tiles = true;
    for_each_coordinate(
        from.mesh, to.dims[d].axes, std::vector<int>(from.mesh.size()),
        [&](const std::vector<int>& kept) {
          const Interval whole = interval_of(to.mesh, to.dims[d], to.shape[d], kept);
          std::int64_t at = whole.begin;
          for_each_coordinate(from.mesh, dropped, kept, [&](const std::vector<int>& c) {
            const Interval part = interval_of(from.mesh, from.dims[d], from.shape[d], c);
            if (part.empty()) return;
            tiles = tiles && part.begin == at;
            at = part.end;
          });
          tiles = tiles && (at == whole.end || whole.empty());
        });
    if (!tiles) return false;
    over.insert(over.end(), dropped.begin(), dropped.end());
  }
  std::ranges::sort(over);
  return !over.empty();
}

std::vector<Box> boxes_over(const ShardedDims& layout, const Axes& axes,
                            const std::vector<int>& own) {
  std::vector<Box> all;
  for_each_coordinate(layout.mesh, axes, own,
                      [&](const std::vector<int>& c) { all.push_back(layout.box(c)); });
  return all;
}

// The place of the rank at a mesh position in its group over `axes`.
int rank_along(const MeshContext& context, const Axes& axes, int position) {
  const Mesh& mesh = context.mesh.mesh();
  return mesh.group_rank(axes, mesh.ranks()[position]);
}

RedistributionPlan::Reduction reduction(const MeshContext& context, Axes axes, ReduceOp::Kind op,
                                        Box whole, std::vector<Box> pieces = {}) {
  const int size = context.mesh.mesh().group_size(axes);
  const int rank = rank_along(context, axes, context.position);
  return {std::move(axes), op, std::move(whole), std::move(pieces), size, rank};
}

// The largest number of ranks that any rank exchanges with, by dims: shards of one layout that meet
// a shard of the other.
double most_peers(const ShardedDims& from, const ShardedDims& to) {
  double peers = 1;
  for (std::size_t d = 0; d < from.shape.size(); ++d) {
    std::int64_t most = 1;
    const auto count = [&](const DimSharding& a, const DimSharding& b) {
      if (b.axes.empty()) return;
      if (a.axes.empty()) {
        most = std::max<std::int64_t>(most, b.partition.parts());
        return;
      }
      for (int i = 0; i < a.partition.parts(); ++i)
        most = std::max(most, b.partition.overlapping(a.partition.interval(i)).size());
    };
    if (from.dims[d] == to.dims[d]) continue;
    count(from.dims[d], to.dims[d]);
    count(to.dims[d], from.dims[d]);
    peers *= static_cast<double>(most);
  }
  return peers;
}

RedistributionPlan::Move plan_move(const ShardedDims& from, const ShardedDims& to,
                                   const MeshContext& context) {
  using Kind = RedistributionPlan::Move::Kind;
  RedistributionPlan::Move move;
  move.after = to.box(context.coordinate);
  if (contained(to, from)) return move;
  // On an axis that does not shard a dim yet, a rank first slices what it holds, by itself.
  ShardedDims sliced = from;
  for (std::size_t d = 0; d < from.shape.size(); ++d) {
    Axes fresh;
    for (const int a : to.dims[d].axes)
      if (!from.sharded_by(a)) fresh.push_back(a);
    sliced.dims[d] = refine(from.mesh, from.dims[d], from.shape[d], fresh, to.dims[d]);
  }
  if (gathers(sliced, to, move.axes)) {
    move.kind = Kind::all_gather;
    move.rank = rank_along(context, move.axes, context.position);
    move.pieces = boxes_over(sliced, move.axes, context.coordinate);
    int holders = 0;
    for (std::size_t r = 0; r < move.pieces.size(); ++r) {
      if (volume(move.pieces[r]) == 0) continue;
      ++holders;
      move.root = static_cast<int>(r);
    }
    if (holders == 1 && move.pieces.size() > 2) move.kind = Kind::broadcast;
    return move;
  }
  move.axes.clear();
  if (all_stays(from, to)) return move;
  for (std::size_t d = 0; d < from.shape.size(); ++d)
    if (!(from.dims[d] == to.dims[d]))
      move.axes.insert(move.axes.end(), from.dims[d].axes.begin(), from.dims[d].axes.end());
  std::ranges::sort(move.axes);
  move.rank = rank_along(context, move.axes, context.position);
  const int ranks = context.mesh.mesh().group_size(move.axes);
  move.kind = most_peers(from, to) >= ranks ? Kind::all_to_all : Kind::exchange;
  move.transfer = transfer_plan(from.sharding(), to.sharding(), context.position);
  for (auto* pieces : {&move.transfer.sends, &move.transfer.receives}) {
    for (Piece& p : *pieces) p.rank = rank_along(context, move.axes, p.rank);
    std::ranges::stable_sort(*pieces,
                             [](const Piece& a, const Piece& b) { return a.rank < b.rank; });
  }
  return move;
}

// Sums and means of different axes can be taken in any order, other reductions cannot: then all are
// reduced, axis by axis.
bool one_op(const ShardSpec& spec) {
  const Placement* first = nullptr;
  for (const Placement& p : spec.placements()) {
    if (!p.is_partial()) continue;
    if (first && first->op != p.op) return false;
    first = &p;
  }
  return true;
}

// Plans the reductions over the axes that have `ended`, by which `now` becomes what is left to be
// moved to `target`.
void reduce_ended(RedistributionPlan& plan, const MeshContext& context, const Axes& ended,
                  ReduceOp::Kind op, const ShardedDims& target, ShardedDims& now) {
  const auto& mesh = context.sizes;
  const auto& me = context.coordinate;
  if (contained(target, now)) {
    Axes scattered, alike;
    for (const int a : ended) (target.sharded_by(a) ? scattered : alike).push_back(a);
    if (!scattered.empty())
      plan.reductions.push_back(
          reduction(context, scattered, op, plan.before, boxes_over(target, scattered, me)));
    if (!alike.empty()) plan.reductions.push_back(reduction(context, alike, op, target.box(me)));
    now.dims = target.dims;
  } else {
    std::vector<Axes> slices(now.dims.size()), pieces(now.dims.size());
    for (int a = 0; a < static_cast<int>(mesh.size()); ++a) {
      const int d = target.dim_of(a);
      if (has(ended, a))
        pieces[d >= 0 ? d : now.longest()].push_back(a);
      else if (d >= 0 && !now.sharded_by(a))
        slices[d].push_back(a);
    }
    for (std::size_t d = 0; d < now.dims.size(); ++d) {
      now.dims[d] = refine(mesh, now.dims[d], now.shape[d], slices[d], target.dims[d]);
      now.dims[d] = refine(mesh, now.dims[d], now.shape[d], pieces[d], target.dims[d]);
    }
    plan.reductions.push_back(
        reduction(context, ended, op, plan.before, boxes_over(now, ended, me)));
  }
}

// A shard, or a part of what is reduced, that becomes a summand stays where it is: `target` is
// sharded further in the meantime. These axes leave `made`.
void keep_as_summands(RedistributionPlan& plan, const MeshContext& context, const ShardSpec& to,
                      const Axes& ended, const ShardedDims& now, ShardedDims& target, Axes& made) {
  const auto& mesh = context.sizes;
  std::vector<Axes> extra(target.dims.size());
  // then ranks that would clear what they receive get a shard each instead
  const bool moves = !contained(target, now);
  std::erase_if(made, [&](int a) {
    const int d = now.sharded_by(a)        ? now.dim_of(a)
                  : moves || has(ended, a) ? target.longest()
                                           : -1;
    if (d < 0) return false;
    extra[d].push_back(a);
    plan.pad = true;
    plan.identity = to.placements()[a].op;
    if (plan.identity == ReduceOp::Kind::avg) plan.scale *= mesh[a];
    return true;
  });
  for (std::size_t d = 0; d < extra.size(); ++d)
    target.dims[d] = refine(mesh, target.dims[d], now.shape[d], extra[d], now.dims[d]);
}

}  // namespace

RedistributionPlan make_redistribution_plan(const ShardSpec& from, const ShardSpec& to) {
  const MeshContext& context = *context_of(from);
  const auto& mesh = context.sizes;
  const auto& me = context.coordinate;
  RedistributionPlan plan;
  ShardedDims now{from.shape(), mesh, from.sharding().dims()};
  ShardedDims target{from.shape(), mesh, to.sharding().dims()};
  plan.before = now.box(me);
  plan.target = target.box(me);

  Axes ended, made;  // axes that are partial only before, or only after
  ReduceOp::Kind op = ReduceOp::Kind::sum;
  const bool mixed = !one_op(from);
  for (int a = 0; a < from.mesh_dims(); ++a) {
    const Placement was = from.placements()[a], will = to.placements()[a];
    const bool stays = was.is_partial() && was == will && !mixed;
    if (was.is_partial() && !stays) {
      ended.push_back(a);
      op = was.op;
    }
    if (will.is_partial() && !stays) made.push_back(a);
  }
  if (mixed) {
    for (const int a : ended)
      plan.reductions.push_back(reduction(context, {a}, from.placements()[a].op, plan.before));
    ended.clear();
  }

  if (one_op(to)) keep_as_summands(plan, context, to, ended, now, target, made);
  for (const int a : made) {  // become partial by clearing all but the first rank
    const auto kind = to.placements()[a].op;
    // else: the same value everywhere
    if (me[a] == 0 || (kind != ReduceOp::Kind::sum && kind != ReduceOp::Kind::product)) continue;
    // the first axis is reduced first
    if (!plan.clear) plan.identity = kind;
    plan.clear = true;
  }

  if (!ended.empty()) reduce_ended(plan, context, ended, op, target, now);
  plan.move = plan_move(now, target, context);
  return plan;
}

std::int64_t RedistributionPlan::moved() const {
  switch (move.kind) {
    case Move::Kind::none:
      return 0;
    case Move::Kind::all_gather:
    case Move::Kind::broadcast:
      return volume(move.after) - volume(move.pieces[move.rank]);
    case Move::Kind::all_to_all:
    case Move::Kind::exchange:
      return move.transfer.received();
  }
  return 0;
}

std::int64_t RedistributionPlan::received(const Reduction& r) {
  if (!r.pieces.empty()) return volume(r.pieces[r.rank]) * (r.ranks - 1);
  const std::int64_t all = volume(r.whole), mine = all / r.ranks + (r.rank < all % r.ranks ? 1 : 0);
  return mine * (r.ranks - 1) + all - mine;
}

std::shared_ptr<const RedistributionPlan> RedistributionPlans::of(const ShardSpec& from,
                                                                  const ShardSpec& to) {
  constexpr std::size_t kLimit = 4096;
  const std::uint64_t key = from.data()->hash * 0x9e3779b97f4a7c15ull ^ to.data()->hash;
  const std::lock_guard lock(mutex_);
  const auto [begin, end] = entries_.equal_range(key);
  for (auto it = begin; it != end; ++it) {
    const Entry& e = it->second;
    if (e.from_placements == from.placements() && e.to_placements == to.placements() &&
        e.from.shape() == from.shape() && e.from.dims() == from.sharding().dims() &&
        e.to.dims() == to.sharding().dims()) {
      return e.plan;
    }
  }
  if (entries_.size() >= kLimit) entries_.clear();
  RedistributionPlan made = make_redistribution_plan(from, to);
  made.origin = std::make_shared<const CallOrigin>(
      concat("the redistribution of ", list(from.shape()), " from ", list(from.placements()),
             " to ", list(to.placements())));
  auto plan = std::make_shared<const RedistributionPlan>(std::move(made));
  entries_.emplace(key,
                   Entry{from.placements(), to.placements(), from.sharding(), to.sharding(), plan});
  return plan;
}

}  // namespace tessera::detail
