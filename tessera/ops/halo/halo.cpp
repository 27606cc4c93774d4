#include "tessera/ops/halo/halo.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/ops/halo/detail/peer_exchange.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace detail {

struct HaloState {
  ShardSpec field;
  std::shared_ptr<MeshContext> context;
  std::vector<Edge> edges;
  HaloPlan plan;
  Box owned;
  bool travels = false;
  HaloMethod method = HaloMethod::point_to_point;
  std::vector<int> axes;  // those that shard the dims along which values are sent
  // for each mesh position its rank in the group, or -1
  std::vector<int> group_rank;
  Sizes send_counts, receive_counts;    // elements, by rank of the group
  std::shared_ptr<PeerExchange> peers;  // where values are sent

  // Looked up at each use: a plan that is kept must not keep a group that has ended.
  Group group() const { return context->mesh.group(axes); }
};

}  // namespace detail

namespace {

using detail::HaloState;
using detail::LocalCallGuard;
using detail::PeerBuffers;
using detail::PeerExchange;
using detail::PeerPiece;
using detail::PeerTransfer;
using detail::shape_of;

// The box `box` of a tensor whose own box is `of`.
at::Tensor view_of(const at::Tensor& t, const Box& of, const Box& box) {
  c10::SmallVector<std::int64_t, 5> sizes;
  std::int64_t offset = t.storage_offset();
  for (std::size_t d = 0; d < box.size(); ++d) {
    sizes.push_back(box[d].size());
    offset += (box[d].begin - of[d].begin) * t.stride(static_cast<std::int64_t>(d));
  }
  return t.as_strided(sizes, t.strides(), offset);
}

// The values that `piece` has at the target indices `box`, from a tensor whose own box is `of`.
at::Tensor values_at(const at::Tensor& t, const Box& of, const HaloPiece& piece, const Box& box) {
  Box source(box.size());
  std::vector<std::int64_t> flips;
  bool stretched = false;
  for (std::size_t d = 0; d < box.size(); ++d) {
    const std::int64_t first = box[d].begin - piece.target[d].begin,
                       last = box[d].end - piece.target[d].begin;
    const Interval& s = piece.source[d];
    if (piece.step[d] > 0) {
      source[d] = {s.begin + first, s.begin + last};
    } else if (piece.step[d] < 0) {
      source[d] = {s.end - last, s.end - first};
      if (source[d].size() > 1) flips.push_back(static_cast<std::int64_t>(d));
    } else {
      source[d] = s;
      stretched |= box[d].size() != 1;
    }
  }
  at::Tensor v = view_of(t, of, source);
  if (!flips.empty()) v = v.flip(flips);
  if (stretched) v = v.expand(shape_of(box));
  return v;
}

// The adjoint of values_at over the complete piece: a gradient of the target as one of the source.
at::Tensor folded(const at::Tensor& gradient, const Box& of, const HaloPiece& piece) {
  at::Tensor v = view_of(gradient, of, piece.target);
  std::vector<std::int64_t> flips, sums;
  for (std::size_t d = 0; d < piece.step.size(); ++d) {
    if (piece.step[d] < 0 && v.size(static_cast<std::int64_t>(d)) > 1)
      flips.push_back(static_cast<std::int64_t>(d));
    if (piece.step[d] == 0 && v.size(static_cast<std::int64_t>(d)) != 1)
      sums.push_back(static_cast<std::int64_t>(d));
  }
  if (!sums.empty()) v = v.sum(sums, true);
  return flips.empty() ? v : v.flip(flips);
}

Request launch(const HaloState& state, const PeerBuffers& buffers, bool back) {
  if (!state.travels) return {};
  if (state.method == HaloMethod::all_to_all) {
    return back ? state.group().started().all_to_all(buffers.sent, buffers.received,
                                                     state.send_counts, state.receive_counts,
                                                     {.name = "halo_sum"})
                : state.group().started().all_to_all(buffers.received, buffers.sent,
                                                     state.receive_counts, state.send_counts,
                                                     {.name = "halo"});
  }
  const auto& messages = back ? buffers.back : buffers.messages;
  if (messages.empty()) return {};
  return state.group().started().exchange(messages, {.name = back ? "halo_sum" : "halo"});
}

void check_shape(const at::Tensor& t, const std::vector<std::int64_t>& shape, const char* what) {
  if (is_sharded(t))
    throw InvalidArgument(what, " is a ShardTensor; it must be this rank's, to_local()");
  if (t.sizes() != at::IntArrayRef(shape))
    throw InvalidArgument(what, " has shape ", t.sizes(), "; it must be ", list(shape));
}

// A box whose elements cannot be counted would come out as one of any size.
void require_countable(const Box& box) {
  std::int64_t all = 1, size = 0;
  for (const Interval& i : box)
    if (__builtin_sub_overflow(i.end, i.begin, &size) ||
        __builtin_mul_overflow(all, std::max<std::int64_t>(size, 1), &all))
      throw InvalidArgument("a halo whose box ", list(box), " has more elements than can be ",
                            "counted");
}

bool contains(const Box& outer, const Box& inner) {
  for (std::size_t d = 0; d < outer.size(); ++d)
    if (!outer[d].contains(inner[d])) return false;
  return true;
}

// The dim along which the boxes follow each other and make up `all`, or -1. Sorts them by it.
template <class Parts>
std::int64_t joined_along(Parts& parts, const Box& all) {
  std::int64_t along = -1;
  for (std::size_t d = 0; d < all.size(); ++d) {
    if (std::ranges::all_of(parts, [&](const auto& part) { return part.at[d] == all[d]; }))
      continue;
    if (along >= 0) return -1;
    along = static_cast<std::int64_t>(d);
  }
  if (along < 0) return -1;
  std::ranges::sort(parts, {}, [&](const auto& part) { return part.at[along].begin; });
  std::int64_t end = all[along].begin;
  for (const auto& part : parts)
    if (part.at[along].begin != std::exchange(end, part.at[along].end)) return -1;
  return end == all[along].end ? along : -1;
}

// What is zero in a box of which so many elements are known: usually what is beyond zero edges,
// else the box before they are written.
std::vector<Box> uncovered(const HaloState& s, const Box& box, std::int64_t covered) {
  if (covered == volume(box)) return {};
  Box inside = box;
  for (std::size_t d = 0; d < box.size(); ++d)
    if (s.edges[d] == Edge::zero) inside[d] = intersect(inside[d], {0, s.field.shape()[d]});
  return covered == volume(inside) ? difference(box, inside) : std::vector<Box>{box};
}

// The axes along which some position needs what it does not own. The same on all ranks.
std::set<int> travelled_axes(const Sharding& sharding, const std::vector<Edge>& edges,
                             const NeededBox& needed) {
  std::set<int> axes;
  for (int p = 0; p < sharding.positions(); ++p) {
    const Box box = needed(p);
    if (box.size() != sharding.shape().size())
      throw InvalidArgument("position ", p, " needs a box of ", box.size(),
                            " dims of a field with ", sharding.shape().size());
    require_countable(box);
    if (volume(box) == 0) continue;
    const Box own = sharding.box(p);
    for (std::size_t d = 0; d < box.size(); ++d) {
      if (sharding.dims()[d].axes.empty()) continue;
      for (const Segment& s : resolve(box[d], sharding.shape()[d], edges[d])) {
        if (own[d].contains(s.sources())) continue;
        axes.insert(sharding.dims()[d].axes.begin(), sharding.dims()[d].axes.end());
        break;
      }
    }
  }
  return axes;
}

// True if every rank of the group has something for every other, in all groups.
bool everyone_needs_everyone(const Sharding& sharding, const std::vector<Edge>& edges,
                             const NeededBox& needed, int group_size) {
  for (int p = 0; p < sharding.positions(); ++p) {
    std::set<int> holders;
    for (const HaloPiece& piece : halo_plan(sharding, edges, needed, p).receives)
      holders.insert(piece.rank);
    if (static_cast<int>(holders.size()) != group_size - 1) return false;
  }
  return true;
}

}  // namespace

Halo::Halo(const ShardSpec& field, std::vector<Edge> edges, NeededBox needed, HaloOptions options)
    : state_(std::make_shared<HaloState>()) {
  if (field.has_partial())
    throw InvalidArgument("a halo of a partial field, ", field, ": redistribute it first");
  if (static_cast<int>(edges.size()) != field.dims())
    throw InvalidArgument(edges.size(), " edges for a field of ", field.dims(), " dims");
  if (!needed) throw InvalidArgument("a halo without a function that says which box is needed");
  HaloState& s = *state_;
  s.field = field;
  s.context = detail::context_of(field);
  s.edges = std::move(edges);
  const Sharding& sharding = field.sharding();
  const std::set<int> axes = travelled_axes(sharding, s.edges, needed);
  s.owned = sharding.box(s.context->position);
  s.travels = !axes.empty();
  s.plan = halo_plan(sharding, s.edges, needed, s.context->position);
  if (!s.travels) return;
  s.axes.assign(axes.begin(), axes.end());
  const int ranks = s.group().size();
  // A position's rank in the group: its coordinates on the group's axes, in mesh order.
  s.group_rank.assign(sharding.positions(), -1);
  for (int p = 0; p < sharding.positions(); ++p) {
    int rank = 0;
    for (const int axis : axes) rank = rank * s.context->sizes[axis] + sharding.coordinate(p, axis);
    s.group_rank[p] = rank;
  }
  s.method = options.method;
  if (s.method == HaloMethod::automatic) {
    // The plans of all positions take quadratic time: only computed if there are few.
    const bool dense = ranks >= 4 && sharding.positions() <= 64 &&
                       everyone_needs_everyone(sharding, s.edges, needed, ranks);
    s.method = dense ? HaloMethod::all_to_all : HaloMethod::point_to_point;
  }
  s.send_counts.assign(ranks, 0);
  s.receive_counts.assign(ranks, 0);
  // An all-to-all needs the peers in the group's order, from which that of the positions differs if
  // an axis of the group shards no dim along which values are sent.
  const auto by_group = [&](const HaloPiece& a, const HaloPiece& b) {
    return s.group_rank[a.rank] < s.group_rank[b.rank];
  };
  std::ranges::stable_sort(s.plan.sends, by_group);
  std::ranges::stable_sort(s.plan.receives, by_group);
  for (const HaloPiece& piece : s.plan.sends)
    s.send_counts[s.group_rank[piece.rank]] += volume(piece.source);
  for (const HaloPiece& piece : s.plan.receives)
    s.receive_counts[s.group_rank[piece.rank]] += volume(piece.source);
  const auto pieces = [&](const std::vector<HaloPiece>& all) {
    return mapped(all, [&](const HaloPiece& piece) {
      return PeerPiece{s.group_rank[piece.rank], shape_of(piece.source)};
    });
  };
  s.peers = std::make_shared<PeerExchange>(pieces(s.plan.sends), pieces(s.plan.receives));
}

namespace {
const HaloState& made(const std::shared_ptr<HaloState>& state) {
  if (!state) throw InvalidArgument("a Halo that was made without arguments: give a field's spec");
  return *state;
}
}  // namespace

const ShardSpec& Halo::field() const { return made(state_).field; }
const HaloPlan& Halo::plan() const { return made(state_).plan; }
const Box& Halo::owned() const { return made(state_).owned; }
const Box& Halo::needed() const { return made(state_).plan.needed; }
bool Halo::travels() const { return made(state_).travels; }
HaloMethod Halo::method() const { return made(state_).method; }
Group Halo::group() const { return made(state_).group(); }

namespace {

class Sum final : public detail::Unfinished<at::Tensor> {
 public:
  Sum(std::shared_ptr<HaloState> state, const at::Tensor& gradient)
      : gradient_(gradient), state_(std::move(state)), transfer_{state_->peers, {}, {}} {
    const HaloState& s = *state_;
    if (!s.travels) return;
    PeerBuffers& buffers = *(transfer_.buffers = s.peers->take(gradient));
    for (std::size_t i = 0; i < s.plan.receives.size(); ++i)
      buffers.receive_pieces[i].copy_(folded(gradient, s.plan.needed, s.plan.receives[i]));
    transfer_.request = launch(s, buffers, true);
  }
  bool done() override { return transfer_.request.done(); }
  at::Tensor finish() override;

 private:
  const at::Tensor gradient_;
  const std::shared_ptr<HaloState> state_;
  PeerTransfer transfer_;
};

}  // namespace

struct HaloValues::State {
  at::Tensor local;
  std::shared_ptr<HaloState> halo;
  PeerTransfer transfer;
};

HaloValues::HaloValues() = default;
HaloValues::HaloValues(HaloValues&&) noexcept = default;
HaloValues& HaloValues::operator=(HaloValues&&) noexcept = default;
HaloValues::~HaloValues() = default;

HaloValues Halo::start_exchange(const at::Tensor& local) const {
  const LocalCallGuard guard;
  check_shape(local, field().local_shape(), "the shard of a halo exchange");
  HaloValues values;
  values.state_ = std::make_unique<HaloValues::State>();
  values.state_->local = local;
  values.state_->halo = state_;
  PeerTransfer& transfer = values.state_->transfer;
  transfer.exchange = state_->peers;
  if (state_->travels) {
    transfer.buffers = state_->peers->take(local);
    for (std::size_t i = 0; i < state_->plan.sends.size(); ++i)
      transfer.buffers->send_pieces[i].copy_(
          view_of(local, state_->owned, state_->plan.sends[i].source));
    transfer.request = launch(*state_, *transfer.buffers, false);
  }
  return values;
}

Request& HaloValues::arrival() {
  if (!state_) throw InvalidArgument("a halo whose exchange was never started: start_exchange()");
  return state_->transfer.request;
}

at::Tensor HaloValues::assemble(const Box& box) {
  Request& request = arrival();
  const LocalCallGuard guard;
  State& f = *state_;
  const HaloState& s = *f.halo;
  if (box.size() != s.owned.size())
    throw InvalidArgument("a box of ", box.size(), " dims of a field with ", s.owned.size());
  if (volume(box) > 0 && contains(s.owned, box)) return view_of(f.local, s.owned, box);
  request.wait();
  struct Part {
    const HaloPiece* piece;
    const at::Tensor* from;
    const Box* of;
    Box at;
  };
  std::vector<Part> parts;
  std::int64_t covered = 0;
  const auto add = [&](const HaloPiece& piece, const at::Tensor& from, const Box& of) {
    Box at = intersect(piece.target, box);
    if (volume(at) == 0) return;
    // a single element that is reflected is its own mirror image
    covered += volume(at) - volume(intersect(at, s.owned));
    parts.push_back({&piece, &from, &of, std::move(at)});
  };
  // What is owned is read from the local wherever it is asked for, needed or not.
  static const HaloPiece kOwn{};
  const Box own = intersect(s.owned, box);
  const bool any_owned = volume(own) > 0;
  if (any_owned) {
    covered += volume(own);
    parts.push_back({&kOwn, &f.local, &s.owned, own});
  }
  for (const HaloPiece& piece : s.plan.copies)
    if (piece.target != piece.source) add(piece, f.local, s.owned);
  for (std::size_t i = 0; i < s.plan.receives.size(); ++i)
    add(s.plan.receives[i], f.transfer.buffers->receive_pieces[i], s.plan.receives[i].source);

  const std::vector<Box> zeros = uncovered(s, box, covered);
  const auto values = [&](const Part& part) {
    if (!part.piece) return at::zeros(shape_of(part.at), f.local.options());
    return part.piece == &kOwn ? view_of(*part.from, *part.of, part.at)
                               : values_at(*part.from, *part.of, *part.piece, part.at);
  };
  if (parts.size() == 1 && covered == volume(box)) return values(parts[0]);
  // In one launch instead of one for each of them.
  std::vector<Part> side_by_side = parts;
  for (const Box& strip : zeros) side_by_side.push_back({nullptr, nullptr, nullptr, strip});
  if (const std::int64_t along = f.local.is_contiguous() ? joined_along(side_by_side, box) : -1;
      along >= 0)
    return at::cat(mapped(side_by_side, values), along);
  at::Tensor result = at::empty(shape_of(box), f.local.options().memory_format(std::nullopt));
  for (const Box& strip : zeros) view_of(result, box, strip).zero_();
  for (const Part& part : parts) view_of(result, box, part.at).copy_(values(part));
  return result;
}

at::Tensor Halo::exchange(const at::Tensor& local) const {
  HaloValues values = start_exchange(local);
  values.arrival().wait();
  const at::Tensor all = values.assemble(needed());
  const LocalCallGuard guard;
  // If it was assembled from one piece alone it is a view of other memory.
  return all.is_contiguous() && all.storage_offset() == 0 && all.storage().use_count() == 1
             ? all
             : all.clone(at::MemoryFormat::Contiguous);
}

Pending<at::Tensor> Halo::start_sum(const at::Tensor& gradient) const {
  const LocalCallGuard guard;
  check_shape(gradient, shape_of(needed()), "the gradient of a halo");
  return Pending<at::Tensor>(std::make_shared<Sum>(state_, gradient));
}

at::Tensor Sum::finish() {
  const LocalCallGuard guard;
  const HaloState& s = *state_;
  const auto& copies = s.plan.copies;
  // Usually one copy of everything that is owned comes first.
  const auto whole = std::ranges::find_if(
      copies, [&](const HaloPiece& p) { return p.source == s.owned && p.target == s.owned; });
  at::Tensor result;
  if (whole != copies.end()) {
    result = view_of(gradient_, s.plan.needed, s.owned).clone(at::MemoryFormat::Contiguous);
  } else {
    result =
        at::empty(s.field.local_shape(), gradient_.options().memory_format(std::nullopt)).zero_();
  }
  for (auto it = copies.begin(); it != copies.end(); ++it)
    if (it != whole)
      view_of(result, s.owned, it->source).add_(folded(gradient_, s.plan.needed, *it));
  transfer_.request.wait();
  for (std::size_t i = 0; i < s.plan.sends.size(); ++i)
    view_of(result, s.owned, s.plan.sends[i].source).add_(transfer_.buffers->send_pieces[i]);
  return result;
}

at::Tensor Halo::sum(const at::Tensor& gradient) const { return start_sum(gradient).wait(); }

}  // namespace tessera
