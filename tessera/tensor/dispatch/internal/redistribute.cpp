#include "tessera/tensor/dispatch/internal/redistribute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/spec/detail/redistribution_plan.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {
namespace {

constexpr CallOptions kCall{std::chrono::milliseconds(0), "redistribute"};

Box hull(const std::vector<Box>& boxes) {
  Box all;
  for (const Box& b : boxes) {
    if (volume(b) == 0) continue;
    if (all.empty()) all = b;
    for (std::size_t d = 0; d < b.size(); ++d)
      all[d] = {std::min(all[d].begin, b[d].begin), std::max(all[d].end, b[d].end)};
  }
  return all.empty() && !boxes.empty() ? boxes[0] : all;
}

// True if the boxes one after the other are `whole` in row-major order: nothing needs to be packed.
bool in_memory_order(const std::vector<Box>& boxes, const Box& whole) {
  std::size_t split = 0;
  while (split < whole.size() && whole[split].size() == 1) ++split;
  if (split == whole.size()) {
    std::int64_t n = 0;
    for (const Box& b : boxes) n += volume(b);
    return n == volume(whole);
  }
  std::int64_t at = whole[split].begin;
  for (const Box& b : boxes) {
    if (volume(b) == 0) continue;
    for (std::size_t d = 0; d < whole.size(); ++d)
      if (d != split && !(b[d] == whole[d])) return false;
    if (b[split].begin != at) return false;
    at = b[split].end;
  }
  return at == whole[split].end || volume(whole) == 0;
}

Sizes volumes(const std::vector<Box>& boxes) {
  Sizes sizes;
  for (const Box& b : boxes) sizes.push_back(volume(b));
  return sizes;
}

// Copies the boxes of `t` into flat memory, one after the other.
at::Tensor pack(const at::Tensor& t, const Box& held, const std::vector<Box>& boxes) {
  const Box all = hull(boxes);
  if (in_memory_order(boxes, all)) return slice(t, held, all).contiguous().view({-1});
  std::int64_t n = 0;
  for (const Box& b : boxes) n += volume(b);
  at::Tensor flat = at::empty({n}, t.options().memory_format(c10::nullopt));
  std::int64_t at = 0;
  for (const Box& b : boxes) {
    const std::int64_t size = volume(b);
    if (size > 0) flat.narrow(0, at, size).view(shape_of(b)).copy_(slice(t, held, b));
    at += size;
  }
  return flat;
}

void unpack(const at::Tensor& t, const at::Tensor& flat, const std::vector<Box>& boxes,
            const Box& whole) {
  std::int64_t at = 0;
  for (const Box& b : boxes) {
    const std::int64_t size = volume(b);
    if (size > 0) slice(t, whole, b).copy_(flat.narrow(0, at, size).view(shape_of(b)));
    at += size;
  }
}

// For booleans a sum is "any", a product "all"; they are sent as bytes.
ReduceOp op_for(ReduceOp::Kind kind, at::ScalarType dtype) {
  if (dtype == at::kBool && kind == ReduceOp::Kind::sum) return ReduceOp::max;
  if (dtype == at::kBool && kind == ReduceOp::Kind::product) return ReduceOp::min;
  return {kind, 1.0};
}

at::Scalar identity_of(ReduceOp::Kind kind, at::ScalarType dtype) {
  if (kind == ReduceOp::Kind::product) return 1;
  if (kind != ReduceOp::Kind::min && kind != ReduceOp::Kind::max) return no_summand(dtype);
  if (!at::isFloatingType(dtype) &&
      (!at::isIntegralType(dtype, true) || at::isBarebonesUnsignedType(dtype)))
    throw InvalidArgument("a ", toString(dtype),
                          " tensor has no minimum or maximum, and cannot become partial by it");
  return neutral(dtype, kind == ReduceOp::Kind::min);
}

}  // namespace

at::Scalar no_summand(at::ScalarType dtype) {
  if (at::isComplexType(dtype)) return c10::complex<double>(-0.0, -0.0);
  return at::isFloatingType(dtype) ? at::Scalar(-0.0) : at::Scalar(0);
}

Redistribution::Redistribution(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to,
                               bool blocking)
    : from_(from), blocking_(blocking), local_(local) {
  const auto& context = context_of(from);
  if (context != context_of(to) || from.shape() != to.shape())
    throw InvalidArgument("cannot redistribute ", from, " as ", to, ": mesh or shape differ");
  plan_ = context->redistributions->of(from, to);
  const LocalCallGuard guard;
  launch();
}

Group Redistribution::group(const std::vector<int>& axes) const {
  return context_of(from_)->mesh.group(axes);
}

bool Redistribution::done() const { return stage_ >= plan_->reductions.size() && request_.done(); }

void Redistribution::launch() {
  std::optional<OriginScope> scope;
  if (!OriginScope::current()) scope.emplace(plan_->origin);
  request_ = {};
  complete_ = {};
  if (stage_ < plan_->reductions.size())
    launch_reduction();
  else
    launch_move();
}

// What the stage before left: the source's box, or a part of it.
const Box& Redistribution::held_box() const {
  if (stage_ == 0) return plan_->before;
  const auto& before = plan_->reductions[stage_ - 1];
  return before.pieces.empty() ? before.whole : before.pieces[before.rank];
}

template <class Call>
void Redistribution::start(const Group& ranks, const Call& call) {
  if (blocking_)
    call(ranks);
  else
    request_ = call(ranks.started());
}

void Redistribution::launch_reduction() {
  const auto& r = plan_->reductions[stage_];
  const Box& held = held_box();
  const auto dtype = local_.scalar_type();
  const ReduceOp op = op_for(r.op, dtype);
  const at::Tensor given = dtype == at::kBool ? local_.to(at::kByte) : local_;
  const bool fresh = own_ || dtype == at::kBool;
  own_ = true;
  const Group ranks = group(r.axes);
  if (r.pieces.empty()) {
    at::Tensor part = slice(given, held, r.whole);
    part = fresh && part.is_contiguous() ? part : part.clone(at::MemoryFormat::Contiguous);
    start(ranks, [&](const auto& on) { return on.all_reduce(part, op, kCall); });
    complete_ = [part, dtype] { return part.to(dtype); };
    return;
  }
  const at::Tensor all = pack(given, held, r.pieces);
  const at::Tensor mine = at::empty({volume(r.pieces[r.rank])}, all.options());
  start(ranks,
        [&](const auto& on) { return on.reduce_scatter(mine, all, op, volumes(r.pieces), kCall); });
  complete_ = [mine, dtype, shape = shape_of(r.pieces[r.rank])] {
    return mine.view(shape).to(dtype);
  };
}

void Redistribution::launch_move() {
  using Kind = RedistributionPlan::Move::Kind;
  const auto& move = plan_->move;
  const Box& held = held_box();
  switch (move.kind) {
    case Kind::none:
      complete_ = [this, &held, &move] {
        // Without elements, perhaps along another dim than what is held.
        if (volume(move.after) == 0 && !(move.after == held))
          return at::empty(shape_of(move.after), local_.options());
        return slice(local_, held, move.after);
      };
      return;
    case Kind::all_gather:
      return launch_all_gather(held);
    case Kind::broadcast:
      return launch_broadcast(held);
    case Kind::all_to_all:
      return launch_all_to_all(held);
    case Kind::exchange:
      return launch_exchange(held);
  }
}

void Redistribution::launch_all_gather(const Box& held) {
  const auto& move = plan_->move;
  const Group ranks = group(move.axes);
  const at::Tensor mine = slice(local_, held, move.pieces[move.rank]).contiguous().view({-1});
  const at::Tensor all = at::empty({volume(move.after)}, mine.options());
  start(ranks,
        [&](const auto& on) { return on.all_gather(all, mine, volumes(move.pieces), kCall); });
  complete_ = [all, &move] {
    if (in_memory_order(move.pieces, move.after)) return all.view(shape_of(move.after));
    at::Tensor result = at::empty(shape_of(move.after), all.options());
    unpack(result, all, move.pieces, move.after);
    return result;
  };
}

void Redistribution::launch_broadcast(const Box& held) {
  const auto& move = plan_->move;
  const Group ranks = group(move.axes);
  const Box& box = move.pieces[move.root];
  at::Tensor all = move.rank == move.root ? slice(local_, held, box).contiguous()
                                          : at::empty(shape_of(box), local_.options());
  start(ranks, [&](const auto& on) { return on.broadcast(all, move.root, kCall); });
  complete_ = [all] { return all; };
}

void Redistribution::launch_all_to_all(const Box& held) {
  const auto& move = plan_->move;
  const Group ranks = group(move.axes);
  std::vector<Box> out(ranks.size(), Box(held.size())), in = out;
  for (const Piece& p : move.transfer.sends) out[p.rank] = p.box;
  for (const Piece& p : move.transfer.receives) in[p.rank] = p.box;
  const Box own = move.transfer.copies.empty() ? Box(held.size()) : move.transfer.copies[0];
  std::vector<Box> parts = in;
  parts[move.rank] = own;
  const bool in_place = in_memory_order(parts, move.after);
  // This rank's own box is copied once, outside the call, unless it is between boxes that
  // arrive.
  const auto nothing = [](const Box& box) { return volume(box) == 0; };
  const bool first = std::all_of(in.begin(), in.begin() + move.rank, nothing),
             last = std::all_of(in.begin() + move.rank, in.end(), nothing);
  const bool along = in_place && !first && !last && volume(own) > 0;
  if (along) in[move.rank] = out[move.rank] = own;
  const Sizes arriving = volumes(in);
  const std::int64_t n = std::accumulate(arriving.begin(), arriving.end(), std::int64_t{0});
  const at::Tensor packed = pack(local_, held, out);
  at::Tensor result = at::empty(shape_of(move.after), packed.options());
  const at::Tensor received =
      in_place ? result.view({-1}).narrow(0, !along && first ? volume(own) : 0, n)
               : at::empty({n}, packed.options());
  if (!blocking_)
    request_ = ranks.started().all_to_all(received, packed, arriving, volumes(out), kCall);
  if (!along && volume(own) > 0) slice(result, move.after, own).copy_(slice(local_, held, own));
  if (blocking_) ranks.all_to_all(received, packed, arriving, volumes(out), kCall);
  complete_ = [result, received, in_place, in = std::move(in), &move] {
    if (!in_place) unpack(result, received, in, move.after);
    return result;
  };
}

void Redistribution::launch_exchange(const Box& held) {
  const auto& move = plan_->move;
  at::Tensor result = at::empty(shape_of(move.after), local_.options());
  std::vector<Message> messages;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals;  // destination, received
  for (const Piece& p : move.transfer.sends)
    messages.push_back({Message::Kind::send, slice(local_, held, p.box).contiguous(), p.rank});
  for (const Piece& p : move.transfer.receives) {
    const at::Tensor part = slice(result, move.after, p.box);
    const at::Tensor buffer = part.is_contiguous() ? part : at::empty(part.sizes(), part.options());
    if (!buffer.is_same(part)) arrivals.emplace_back(part, buffer);
    messages.push_back({Message::Kind::receive, buffer, p.rank});
  }
  if (!messages.empty()) request_ = group(move.axes).started().exchange(messages, kCall);
  for (const Box& box : move.transfer.copies)
    slice(result, move.after, box).copy_(slice(local_, held, box));
  complete_ = [result, arrivals = std::move(arrivals)] {
    for (const auto& [part, buffer] : arrivals) part.copy_(buffer);
    return result;
  };
}

at::Tensor Redistribution::finish() {
  const LocalCallGuard guard;
  while (true) {
    request_.wait();
    local_ = complete_();
    if (stage_ == plan_->reductions.size()) break;
    ++stage_;
    launch();
  }
  const auto& plan = *plan_;
  if (plan.clear)
    return at::full(shape_of(plan.target), identity_of(plan.identity, local_.scalar_type()),
                    local_.options());
  if (!plan.pad) return std::move(local_);
  at::Tensor padded = at::full(shape_of(plan.target),
                               identity_of(plan.identity, local_.scalar_type()), local_.options());
  slice(padded, plan.target, plan.move.after)
      .copy_(plan.scale == 1 ? local_ : local_.mul(plan.scale));
  return padded;
}

at::Tensor redistribute_local(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to) {
  if (from == to) return local;
  // Messages carry values, and what is received is wrapped anew.
  return Redistribution(local.resolve_conj().resolve_neg(), from, to, true).finish();
}

std::int64_t elements_moved(const ShardSpec& from, const ShardSpec& to) {
  return from == to ? 0 : context_of(from)->redistributions->of(from, to)->moved();
}

// Boundaries that move by a row, or by no more than half of an even shard: neighbours exchange rows
// as for a stencil, and shards stay where they are.
static bool shifts_boundaries(const DimSharding& from, const DimSharding& to) {
  const Partition &a = from.partition, &b = to.partition;
  if (from.axes != to.axes || a.parts() != b.parts() || a.extent() != b.extent()) return false;
  for (int i = 0; i < a.parts(); ++i) {
    const std::int64_t rows = std::abs(a.interval(i).end - b.interval(i).end);
    if (rows > 1 && rows > a.extent() / (2 * a.parts())) return false;
  }
  return true;
}

bool moves_shards(const ShardSpec& from, const ShardSpec& to) {
  if (from == to) return false;
  const auto plan = context_of(from)->redistributions->of(from, to);
  if (plan->move.kind == RedistributionPlan::Move::Kind::none) return false;
  // A reduction that is scattered and gathered again counts as one reduction.
  for (int axis = 0; axis < from.mesh_dims(); ++axis) {
    const Placement a = from.placements()[axis], b = to.placements()[axis];
    if (!a.is_shard()) continue;
    if (context_of(from)->sizes[axis] > 1 &&
        (!(a == b) || !shifts_boundaries(from.dim(a.dim), to.dim(a.dim))))
      return true;
  }
  return false;
}

}  // namespace tessera::detail
