#include "tessera/tensor/dispatch/internal/sharded_call.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "tessera/base/text.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/gathered_parameters.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

// Reduces a tensor that is written to in place, together with its aliases and the views of its
// memory, which see the write.
void reduce_target(const OpInfo& info, const at::Tensor& target, const ShardSpec& from,
                   const ShardSpec& to) {
  const ShardMeta& meta = *meta_of(target);
  if (meta.copy)
    throw ShardingError(info.name, " writes to a view of a partial tensor ", from,
                        " that had to be copied. Redistribute it first.");
  if (!meta.base) {
    install_reduced(target, redistribute_local(meta.local, from, to), to);
    return;
  }
  const ShardMeta& base = *meta.base;
  const ShardSpec whole = reduced_like(base.spec(), to);
  if (!base.layout->dense || base.copy) {
    throw ShardingError(info.name, " writes to a view of a partial tensor ", base.spec(),
                        " that has gaps or had to be copied. Redistribute it first.");
  }
  install_reduced(target, redistribute_local(base.local, base.spec(), whole), whole);
  if (!(meta_of(target)->spec() == to))
    throw ShardingError(info.name, " writes to a view of a partial tensor ", base.spec(),
                        " that cannot be reduced with it. Redistribute it first.");
}

// True for a view of all elements of an intermediate Partial result that `to` only reduces: the
// result is then reduced, of which the view is one again, so that its other uses find it so. The
// conditions are global ones, and follow from the program alone.
bool shows_intermediate(const ShardMeta& meta, const ShardSpec& to) {
  if (!meta.base || meta.copy || !(to == without_partial(meta.spec()))) return false;
  const ShardMeta& base = *meta.base;
  const Layout &own = *meta.layout, &whole = *base.layout;
  const auto lazy = [](const at::Tensor& t) { return t.is_conj() || t.is_neg(); };
  return base.intermediate && !base.copy && whole.dense && own.dense &&
         own.offset == whole.offset && own.dtype == whole.dtype &&
         own.spec.numel() == whole.spec.numel() && !lazy(meta.local) && !lazy(base.local) &&
         !(reduced_like(base.spec(), to) == base.spec());
}

// The local without partial axes, in the memory order that it has.
at::Tensor reduced_in_order(const ShardMeta& meta) {
  const ShardSpec to = without_partial(meta.spec());
  return aligned(redistribute_local(meta.local, meta.spec(), to), *under(*meta.layout, to));
}

// An intermediate result that had to be reduced stays reduced: what backward saved of it, and its
// next use, need not reduce it again. Ranks agree: the condition depends on what the program has
// done to the tensor, not on which other tensors refer to it.
void keep_reduced(const at::Tensor& t, const ShardSpec& from, const ShardSpec& to,
                  const at::Tensor& local) {
  if (!from.has_partial() || !(to == without_partial(from))) return;
  const ShardMeta& meta = *meta_of(t);
  if (meta.base || meta.copy || !(meta.spec() == from) || (t.is_leaf() && t.requires_grad()))
    return;
  if (meta.intermediate || t.grad_fn()) install_reduced(t, local, to);
}

// As redistribute_local(). Of a partial tensor that is expanded (the gradient of a sum) the ranks
// reduce each element once, not as often as it is repeated.
at::Tensor redistribute_once(const at::Tensor& local, const Layout& layout, const ShardSpec& to) {
  const ShardSpec& from = layout.spec;
  std::vector<bool> repeated(from.dims(), false);
  bool any = false;
  for (int d = 0; d < from.dims(); ++d) {
    repeated[d] = layout.strides[d] == 0 && from.shape()[d] > 1 && !from.is_sharded(d);
    any |= repeated[d];
  }
  if (!any || !from.has_partial() || to.has_partial() || from.numel() == 0)
    return redistribute_local(local, from, to);
  const auto once = [&](const ShardSpec& spec) {
    Dims shape = spec.shape();
    auto placements = spec.placements();
    std::vector<DimSharding> dims;
    for (int d = 0; d < spec.dims(); ++d) {
      dims.push_back(repeated[d] ? DimSharding{} : spec.dim(d));
      if (repeated[d]) shape[d] = 1;
    }
    for (Placement& p : placements)
      if (p.is_shard() && repeated[p.dim]) p = Replicate();
    return make_spec(context_of(spec), shape, std::move(placements), std::move(dims));
  };
  at::Tensor one = local;
  for (int d = 0; d < from.dims(); ++d)
    if (repeated[d]) one = one.narrow(d, 0, 1);
  return redistribute_local(one, once(from), once(to)).expand(to.local_shape());
}

// In the memory order of the layout, without its gaps. Where elements share an address there is no
// order in which all that is a view there is one.
at::Tensor in_order(const at::Tensor& t, const Layout& layout) {
  if (has_overlap(layout.sizes(), layout.strides)) return t.contiguous();
  const Dims strides = strides_in_order(t.sizes(), layout.strides);
  bool same = t.storage_offset() == 0;
  for (std::int64_t d = 0; d < t.dim(); ++d) same &= t.size(d) == 1 || t.stride(d) == strides[d];
  if (same || t.numel() == 0) return t;
  return at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
}

// The copy that belongs to a view whose base had to be gathered first. `whole` gets the memory
// order of the base, so that what is a view of the base is one of it.
std::shared_ptr<ViewCopy> make_view_copy(const at::Tensor& base, const ShardSpec& to,
                                         at::Tensor& whole) {
  const ShardMeta& meta = *meta_of(base);
  const auto layout = under(*meta.layout, to);
  {
    const LocalCallGuard guard;
    whole = layout->dense ? aligned(std::move(whole), *layout) : in_order(whole, *layout);
    // A rank that has everything was given the base's own memory, other ranks were not.
    if (whole.is_alias_of(meta.local)) whole = whole.clone();
  }
  return std::make_shared<ViewCopy>(whole, to, base);
}

bool makes_view_of_normal(const OpInfo& info, const c10::IValue& base) {
  return info.view && c10::InferenceMode::is_enabled() && base.isTensor() &&
         !base.toTensor().is_inference();
}

// True if both tensors contain the same element at different positions, as TensorIterator refuses
// it on one process.
bool overlap_in_part(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.is_non_overlapping_and_dense() ||
      !b.is_non_overlapping_and_dense())
    return false;
  const auto begin_a = a.storage_offset(), begin_b = b.storage_offset();
  const auto end_a = begin_a + a.numel(), end_b = begin_b + b.numel();
  if (begin_a == begin_b && end_a == end_b) return a.strides() != b.strides();
  return begin_a < end_b && begin_b < end_a;
}

// The tensor whose memory a view uses in the end.
const at::Tensor& memory_of(const ShardMeta& meta) {
  const ShardMeta* at = &meta;
  while (at->copy) at = meta_of(at->copy->base);
  return at->local;
}

bool any_in_host_memory(const OpInfo& info, const c10::IValue* arguments) {
  bool any = false;
  each_tensor(info, arguments, [&](const at::Tensor& t, int, int) {
    const ShardMeta* meta = meta_of(t);
    any |= meta && in_host_memory(*meta);
  });
  return any;
}

}  // namespace

ShardedCall::ShardedCall(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack,
                         const Scan& scan)
    : info_(info),
      plan_(plan),
      stack_(*stack),
      count_(info.kinds.size()),
      first_(stack->size() - count_),
      like_(scan.first->layout),
      context_(*context_of(like_->spec)),
      view_of_normal_(makes_view_of_normal(info, stack_[first_])),
      alias_targets_(info.out_variant || info.resizes),
      targets_(info.writes ? count_ : 0),
      view_copy_(info.view ? scan.first->copy : nullptr),
      view_base_(info.view && stack_[first_].isTensor() ? stack_[first_].toTensor() : at::Tensor()),
      offloaded_(plan.on_device && any_in_host_memory(info, &stack_[first_])) {}

// A view of a base that has changed since is taken again: which ones is known from the program's
// calls, so that all ranks take the same.
void ShardedCall::refresh_copies() const {
  each_tensor(info_, &stack_[first_], [](const at::Tensor& t, int, int) {
    const ShardMeta* meta = meta_of(t);
    if (meta && meta->copy && !meta->copy->fresh()) meta->copy->refresh();
  });
}

void ShardedCall::run() {
  // A plan has an origin where the rank does something of its own, so on some ranks: what copies of
  // views send has none.
  if (context_.state->copies.any()) refresh_copies();
  if (plan_.origin) {
    const OriginScope scope(plan_.origin);
    run_steps();
  } else {
    run_steps();
  }
  write_back();
}

void ShardedCall::run_steps() {
  if (plan_.moves_shards) check_policy();
  if (info_.writes && (info_.pointwise || info_.name == "aten::copy_")) refuse_overlap();
  if (offloaded_) choose_memory();
  redistribute_inputs();
  find_copied();
  substitute_locals();
  if (plan_.mode == ReadyPlan::Mode::replicated) {
    // the same on all ranks, also if it fails
    run_local();
    wrap_results();
  } else {
    try {
      run_local();
      wrap_results();
    } catch (...) {
      rethrow_to_all(info_.name, context_);
    }
  }
}

void ShardedCall::check_policy() const {
  if (context_.state->policies.redistribution == Policy::allow) return;
  std::vector<ImplicitMove> moves;
  for (const auto& move : plan_.moves) {
    if (!move.announced) continue;
    moves.push_back({info_.op.schema().arguments()[move.argument].name(), move.from, move.to,
                     static_cast<std::int64_t>(argument(move).element_size())});
  }
  check_implicit_moves(info_.name, moves, context_);
}

// An input that is redistributed, or was copied, no longer overlaps the target: plain libtorch
// refuses the overlap.
void ShardedCall::refuse_overlap() const {
  const c10::IValue& written = stack_[first_];
  const ShardMeta* target = written.isTensor() ? meta_of(written.toTensor()) : nullptr;
  if (!target || (plan_.moves.empty() && !target->copy)) return;
  for (std::size_t i = 1; i < count_; ++i) {
    if (info_.kinds[i] != OpInfo::Kind::tensor || !stack_[first_ + i].isTensor()) continue;
    const at::Tensor& t = stack_[first_ + i].toTensor();
    const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
    if (meta && memory_of(*meta).is_alias_of(memory_of(*target)) &&
        overlap_in_part(written.toTensor(), t))
      throw InvalidArgument(info_.name, ": elements of ", info_.op.schema().arguments()[i].name(),
                            " are written to while they are read. Clone it first.");
  }
}

// The same on all ranks: it depends on which tensors the program keeps in host memory alone.
void ShardedCall::choose_memory() {
  bool writes_host = false, writes_device = false;
  std::int64_t host_dims = -1, device_dims = -1;
  each_tensor(info_, &stack_[first_], [&](const at::Tensor& t, int argument, int) {
    const ShardMeta* meta = meta_of(t);
    if (!meta) return;
    if (in_host_memory(*meta)) shown_ = meta->layout->device;
    const bool host = meta->local.is_cpu();
    if (info_.written[argument]) (host ? writes_host : writes_device) = true;
    std::int64_t& dims = host ? host_dims : device_dims;
    dims = std::max(dims, t.dim());
  });
  if (writes_host && writes_device)
    throw ShardingError(info_.name,
                        " writes to tensors in host memory and to others on the device at "
                        "once. Call it for each of the two.");
  on_host_ =
      writes_host || (!writes_device && (device_dims < 0 || (device_dims == 0 && host_dims > 0)));
}

// A result that is asked for on the device shown is one like its input, in host memory: that is
// what libtorch's factories pass on by default.
void ShardedCall::keep_device_arguments() {
  for (std::size_t i = 0; i < count_; ++i) {
    c10::IValue& v = stack_[first_ + i];
    if (!v.isDevice()) continue;
    if (v.toDevice() == shown_)
      v = c10::Device(c10::kCPU);
    else
      elsewhere_ = true;
  }
}

void ShardedCall::redistribute_inputs() {
  for (const ReadyPlan::Move& move : plan_.moves) {
    const at::Tensor t = argument(move);
    const bool as_planned = meta_of(t)->spec() == move.to;  // reduced with another target
    if (info_.written[move.argument]) {
      if (!as_planned) reduce_target(info_, t, meta_of(t)->spec(), move.to);
      continue;
    }
    Moved moved{move.argument, move.element, {}};
    if (as_planned) {
      moved.local = placed(meta_of(t)->local, *meta_of(t));
    } else if (const Moved* before = moved_before(t, move.to)) {
      moved.local = before->local;
    } else {
      moved.source = t;
      moved.move = &move;
      if (!plan_.view_copied && shows_intermediate(*meta_of(t), move.to))
        reduce_below(moved);
      else
        moved.local = placed(redistributed(t, move), *meta_of(t));
    }
    moved_.push_back(std::move(moved));
  }
}

// A result that is no view and is a parameter's all the same is a copy of it in another dtype.
void ShardedCall::find_copied() {
  if (info_.view || plan_.outputs.empty() || !plan_.outputs[0].layout ||
      !plan_.outputs[0].layout->parameter)
    return;
  const c10::IValue& v = stack_[first_];
  const ShardMeta* meta = v.isTensor() && v.toTensor().defined() ? meta_of(v.toTensor()) : nullptr;
  if (meta && !meta->copy)
    std::tie(copied_from_, copied_index_) = context_.state->sources.find(meta->local);
}

void ShardedCall::substitute_locals() {
  const LocalCallGuard guard;
  if (on_host_) keep_device_arguments();
  for (std::size_t i = 0; i < count_; ++i) {
    c10::IValue& v = stack_[first_ + i];
    const int argument = static_cast<int>(i);
    if (info_.writes && info_.written[i]) targets_[i] = v;
    if (info_.kinds[i] == OpInfo::Kind::tensor && v.isTensor()) {
      at::Tensor local = local_of(v.toTensor(), argument, -1);
      v = std::move(local);
    } else if (info_.kinds[i] == OpInfo::Kind::tensor_list && v.isList()) {
      c10::List<at::Tensor> list;
      int element = 0;
      for (const c10::IValue& t : v.toListRef())
        list.push_back(local_of(t.toTensor(), argument, element++));
      v = std::move(list);
    } else if (info_.kinds[i] == OpInfo::Kind::optional_tensor_list && v.isList()) {
      c10::List<std::optional<at::Tensor>> list;
      int element = -1;
      for (const c10::IValue& t : v.toListRef()) {
        ++element;
        list.push_back(t.isTensor() ? std::optional(local_of(t.toTensor(), argument, element))
                                    : std::nullopt);
      }
      v = std::move(list);
    }
  }
  // Not earlier: an operator may need a tensor reduced in one argument and unchanged in another.
  for (const Moved& m : moved_) {
    if (m.below.defined()) {
      if (const ShardMeta& meta = *meta_of(m.source); meta.base)
        install_reduced(m.source, m.below, without_partial(meta.base->spec()));
    } else if (m.move) {
      keep_reduced(m.source, m.move->from, m.move->to, m.local);
    }
  }
}

at::Tensor ShardedCall::argument(const ReadyPlan::Move& move) const {
  const c10::IValue& v = stack_[first_ + move.argument];
  return move.element < 0 ? v.toTensor() : v.toListRef()[move.element].toTensor();
}

const ShardedCall::Moved* ShardedCall::moved_before(const at::Tensor& source,
                                                    const ShardSpec& to) const {
  const auto found = std::ranges::find_if(moved_, [&](const Moved& m) {
    return m.move && m.source.is_same(source) && m.move->to == to;
  });
  return found == moved_.end() ? nullptr : &*found;
}

void ShardedCall::reduce_below(Moved& moved) {
  const ShardMeta& view = *meta_of(moved.source);
  const ShardMeta& base = *view.base;
  moved.below = reduced_in_order(base);
  const LocalCallGuard guard;
  moved.local = moved.below.as_strided(
      view.local.sizes(), view.local.strides(),
      view.local.storage_offset() - base.local.storage_offset() + moved.below.storage_offset());
}

// In the memory order of the global tensor, like every local: kernels and views decide by strides.
at::Tensor ShardedCall::redistributed(const at::Tensor& t, const ReadyPlan::Move& move) {
  const ShardMeta& meta = *meta_of(t);
  if (!plan_.view_copied) {
    if (at::Tensor gathered = gathered_by_source(t, move.to); gathered.defined()) return gathered;
  }
  GatheredParameters* kept = plan_.view_copied ? nullptr : GatheredParameters::current();
  at::Tensor local = kept ? kept->find(t, move.to) : at::Tensor();
  if (!local.defined()) {
    const at::Tensor own = offloaded_ && !on_host_ ? on_device(meta) : meta.local;
    local = aligned(redistribute_once(own, *meta.layout, move.to), *under(*meta.layout, move.to));
    if (kept) kept->add(t, move.to, local);
  }
  if (plan_.view_copied && info_.view && move.argument == 0)
    view_copy_ = make_view_copy(t, move.to, local);
  return local;
}

at::Tensor ShardedCall::local_of(const at::Tensor& t, int argument, int element) const {
  const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
  if (!meta) return t;
  if (meta->copy) meta->copy->require_fresh(info_.name);
  if (info_.written[argument] && alias_targets_) return meta->local.detach();
  for (const Moved& m : moved_)
    if (m.argument == argument && m.element == element) return m.local;
  return offloaded_ && !on_host_ && in_host_memory(*meta) ? uploaded(*meta)
                                                          : placed(meta->local, *meta);
}

// A local, where the call computes.
at::Tensor ShardedCall::placed(at::Tensor local, const ShardMeta& of) const {
  if (!offloaded_ || !local.defined()) return local;
  if (on_host_) return local.is_cpu() ? local : to_host(local);
  return in_host_memory(of) ? local.to(of.layout->device) : local;
}

// A local that lies in host memory, on the device: as its source has it, if it is a parameter's and
// its rank needs no other's shard.
at::Tensor ShardedCall::uploaded(const ShardMeta& meta) const {
  if (const auto [source, index] = context_.state->sources.find(meta.local); source && !meta.copy) {
    if (at::Tensor gathered = source->gathered(index, meta, meta.spec()); gathered.defined())
      return gathered;
  }
  return on_device(meta);
}

bool reduce_intermediate(const at::Tensor& tensor) {
  const ShardMeta* meta = tensor.defined() ? meta_of(tensor) : nullptr;
  if (!meta || !meta->spec().has_partial()) return false;
  const bool shows = shows_intermediate(*meta, without_partial(meta->spec()));
  if (!shows && (!meta->intermediate || meta->base || meta->copy)) return false;
  const ShardMeta& of = shows ? *meta->base : *meta;
  install_reduced(tensor, reduced_in_order(of), without_partial(of.spec()));
  return true;
}

}  // namespace tessera::detail
