#include "tessera/tensor/detail/redistribute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/base/text.h"
#include "tessera/partition/transfer.h"
#include "tessera/tensor/detail/layout.h"
#include "tessera/tensor/detail/mesh_context.h"
#include "tessera/tensor/detail/no_dispatch.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

at::Tensor slice(const at::Tensor& t, const Box& box, const std::vector<std::int64_t>& offset) {
  at::Tensor part = t;
  for (std::size_t d = 0; d < box.size(); ++d) part = part.narrow(static_cast<std::int64_t>(d), box[d].begin - offset[d], box[d].size());
  return part;
}

// Sums and extrema of bool travel as bytes.
at::Tensor reducible(const at::Tensor& t) { return t.scalar_type() == at::kBool ? t.to(at::kByte) : t; }

at::Tensor all_reduce(const at::Tensor& local, const Group& group, ReduceOp op) {
  at::Tensor sum = reducible(local);
  sum = sum.is_same(local) ? local.clone(at::MemoryFormat::Contiguous) : sum.contiguous();
  group.all_reduce(sum, op, {.name = "redistribute"});
  return sum.to(local.scalar_type());
}

// Partial on `axis` -> Shard(d) on it, d cut by this axis alone.
at::Tensor reduce_scatter(const at::Tensor& local, const Group& group, int d, const Partition& parts, ReduceOp op) {
  const at::Tensor rows = reducible(local).movedim(d, 0).contiguous();
  auto shape = rows.sizes().vec();
  shape[0] = parts.size(group.rank());
  at::Tensor mine = at::empty(shape, rows.options());
  group.reduce_scatter(mine, rows, op, parts.sizes(), {.name = "redistribute"});
  return mine.movedim(0, d).to(local.scalar_type());
}

// Shard(d) -> Replicate on the one axis that cuts d.
at::Tensor all_gather(const at::Tensor& local, const Group& group, int d, const Partition& parts) {
  const at::Tensor rows = local.movedim(d, 0).contiguous();
  auto shape = rows.sizes().vec();
  shape[0] = parts.extent();
  at::Tensor all = at::empty(shape, rows.options());
  group.all_gather(all, rows, parts.sizes(), {.name = "redistribute"});
  return all.movedim(0, d);
}

at::Tensor exchange(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to) {
  const auto& context = context_of(from);
  const TransferPlan plan = transfer_plan(from.sharding(), to.sharding(), context->position);
  if (plan.local() && to.local_numel() == 0) return at::empty(to.local_shape(), local.options());
  if (plan.local()) return slice(local, to.sharding().box(context->position), from.local_offset());
  at::Tensor result = at::empty(to.local_shape(), local.options());
  std::vector<Message> messages;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals;  // where to, what arrived
  for (const Piece& piece : plan.sends) {
    messages.push_back({Message::Kind::send, slice(local, piece.box, from.local_offset()).contiguous(), piece.rank});
  }
  for (const Piece& piece : plan.receives) {
    at::Tensor part = slice(result, piece.box, to.local_offset());
    at::Tensor buffer = part.is_contiguous() ? part : at::empty(part.sizes(), part.options());
    if (!buffer.is_same(part)) arrivals.emplace_back(part, buffer);
    messages.push_back({Message::Kind::receive, buffer, piece.rank});
  }
  Request request = context->mesh.all().start_exchange(messages, {.name = "redistribute"});
  for (const Box& box : plan.copies) slice(result, box, to.local_offset()).copy_(slice(local, box, from.local_offset()));
  request.wait();
  for (const auto& [part, buffer] : arrivals) part.copy_(buffer);
  return result;
}

// Replicate -> Partial(op): such that the reduction gives the value back.
at::Tensor to_partial(const at::Tensor& local, int coordinate, ReduceOp::Kind op) {
  if (coordinate == 0) return local;
  switch (op) {
    case ReduceOp::Kind::sum:
      return at::zeros_like(local);
    case ReduceOp::Kind::product:
      return at::full_like(local, 1);
    default:
      return local;
  }
}

}  // namespace

at::Tensor redistribute_local(const at::Tensor& given, const ShardSpec& from, const ShardSpec& to) {
  if (from == to) return given;
  if (context_of(from) != context_of(to) || from.shape() != to.shape()) {
    throw InvalidArgument(concat("cannot redistribute ", from, " as ", to, ": mesh or shape differ"));
  }
  const LocalCallGuard guard;
  const auto& context = context_of(from);
  at::Tensor local = given;
  ShardSpec now = from;
  for (int axis = 0; axis < from.mesh_dims(); ++axis) {
    const Placement was = from.placements()[axis], will = to.placements()[axis];
    if (!was.is_partial() || was == will) continue;
    const ReduceOp op{was.op, 1.0};
    const bool whole_axis = will.is_shard() && !now.is_sharded(will.dim) && to.dim(will.dim).axes.size() == 1;
    if (whole_axis && was.op != ReduceOp::Kind::avg) {
      local = reduce_scatter(local, context->group(axis), will.dim, to.dim(will.dim).partition, op);
      std::vector<const DimSharding*> parts;
      for (int d = 0; d < now.dims(); ++d) parts.push_back(d == will.dim ? &to.dim(d) : &now.dim(d));
      auto placements = now.placements();
      placements[axis] = will;
      now = make_spec(context, now.shape(), std::move(placements), parts);
    } else {
      local = all_reduce(local, context->group(axis), op);
      now = now.with_placement(axis, Replicate());
    }
  }
  // What becomes partial is replicated until the end.
  auto placements = to.placements();
  for (int axis = 0; axis < to.mesh_dims(); ++axis) {
    if (placements[axis].is_partial() && !(now.placements()[axis] == placements[axis])) placements[axis] = Replicate();
  }
  const ShardSpec target = to.with_placements(placements);
  for (int axis = 0; axis < now.mesh_dims() && !(now == target); ++axis) {
    const Placement was = now.placements()[axis];
    if (!was.is_shard() || !target.placements()[axis].is_replicate() || now.dim(was.dim).axes.size() != 1) continue;
    local = all_gather(local, context->group(axis), was.dim, now.dim(was.dim).partition);
    now = now.with_placement(axis, Replicate());
  }
  if (!(now == target)) local = exchange(local, now, target);
  for (int axis = 0; axis < to.mesh_dims(); ++axis) {
    if (placements[axis] == to.placements()[axis]) continue;
    local = to_partial(local, context->coordinate[axis], to.placements()[axis].op);
  }
  return local;
}

double elements_moved(const ShardSpec& from, const ShardSpec& to) {
  if (from == to) return 0;
  double moved = 0;
  double held = 1;  // share of the tensor that a rank holds, on average, as axes are dealt with
  const auto& sizes = context_of(from)->sizes;
  for (int axis = 0; axis < from.mesh_dims(); ++axis) {
    if (from.placements()[axis].is_shard()) held /= sizes[axis];
  }
  const double all = static_cast<double>(from.numel());
  for (int axis = 0; axis < from.mesh_dims(); ++axis) {
    const Placement a = from.placements()[axis], b = to.placements()[axis];
    const double n = sizes[axis], rest = (n - 1) / n;
    if (a == b) {
      if (a.is_shard() && !(from.dim(a.dim) == to.dim(a.dim))) moved += all * held * rest;
      continue;
    }
    if (a.is_shard() && b.is_shard()) {
      moved += all * held * rest;
    } else if (a.is_shard()) {
      moved += all * held * (n - 1);
      held *= n;
    } else if (a.is_partial()) {
      moved += all * held * rest * (b.is_shard() ? 1 : 2);
      if (b.is_shard()) held /= n;
    } else if (b.is_shard()) {
      held /= n;
    }
  }
  return moved;
}

bool moves_shards(const ShardSpec& from, const ShardSpec& to) {
  for (int axis = 0; axis < from.mesh_dims(); ++axis) {
    const Placement a = from.placements()[axis], b = to.placements()[axis];
    if (!a.is_shard()) continue;
    if (!(a == b) || !(from.dim(a.dim) == to.dim(a.dim))) return context_of(from)->sizes[axis] > 1;
  }
  return false;
}

}  // namespace tessera::detail
