// The second half of a ShardedCall: the local call, and what becomes of its results.

#include <iterator>

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/dispatch/internal/sharded_call.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

// Tells copies of views about a write to their base, and writes back what was written to a copy.
void note_written(const c10::IValue& v, RankState& state) {
  const ShardMeta* meta = v.isTensor() && v.toTensor().defined() ? meta_of(v.toTensor()) : nullptr;
  if (!meta) return;
  if (state.copies.any()) state.copies.wrote(meta->local, nullptr);
  if (state.sources.any()) state.sources.wrote(meta->local);
  if (meta->copy) meta->copy->write_back();
}

}  // namespace

void ShardedCall::run_local() {
  // On the global values everything is as on one process, autocast inside of the operator too. On
  // shards it is not: a rank whose shard is empty might choose another dtype.
  const bool as_one_process = plan_.mode == ReadyPlan::Mode::replicated && !plan_.local;
  std::optional<LocalCallGuard> local;
  if (!as_one_process) local.emplace();
  const BelowAutogradGuard guard;
  for (const auto& [i, value] : plan_.arguments) stack_[first_ + i] = value;
  if (plan_.local)
    run_local_function();
  else if (alias_targets_)
    run_on_aliases();
  else
    info_.op.callBoxed(&stack_);
}

void ShardedCall::wrap_results() {
  std::size_t position = 0;
  const std::size_t results = stack_.size() - info_.returns.size();
  for (std::size_t i = 0; i < info_.returns.size(); ++i) {
    c10::IValue& v = stack_[results + i];
    const OpInfo::Return& r = info_.returns[i];
    if (r.argument >= 0) {
      v = targets_[r.argument];
    } else if (r.tensor) {
      if (v.isTensor()) v = wrap(std::move(v).toTensor(), r.view, position++);
    } else if (r.list) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& t : v.toListRef())
        list.push_back(wrap(t.toTensor(), r.view, position++));
      v = std::move(list);
    }
  }
}

void ShardedCall::write_back() const {
  for (const c10::IValue& target : targets_) {
    note_written(target, *context_.state);
    if (!target.isTensorList()) continue;
    for (const c10::IValue& t : target.toListRef()) {
      note_written(t, *context_.state);
      // libtorch's kernels of lists write to one tensor after the other, and count each write. For
      // sharded tensors they write to the locals, and nothing has been counted.
      if (t.isTensor() && t.toTensor().defined() && !t.toTensor().is_inference())
        t.toTensor().unsafeGetTensorImpl()->bump_version();
    }
  }
}

// The device that a result shows.
c10::Device ShardedCall::shown_by(const at::Tensor& result) const {
  return on_host_ && !elsewhere_ ? shown_ : result.device();
}

void ShardedCall::run_local_function() {
  torch::jit::Stack given(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
  stack_.resize(first_);
  torch::jit::Stack made = plan_.local(info_.op, std::move(given));
  stack_.insert(stack_.end(), std::make_move_iterator(made.begin()),
                std::make_move_iterator(made.end()));
  if (stack_.size() != first_ + info_.returns.size()) {
    throw RuleError("the local function of the rule of ", info_.name, " returns ",
                    stack_.size() - first_, " values, the operator ", info_.returns.size());
  }
}

// The targets adopt what the call has made of their aliases.
void ShardedCall::run_on_aliases() {
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;
  for (std::size_t i = 0; i < count_; ++i)
    if (info_.written[i] && targets_[i].isTensor() && targets_[i].toTensor().defined())
      aliases.emplace_back(targets_[i].toTensor(), stack_[first_ + i].toTensor());
  info_.op.callBoxed(&stack_);
  for (const auto& [target, alias] : aliases) {
    const ShardMeta* meta = meta_of(target);
    if (!meta) continue;
    // A local that was not replaced is still a view of its base.
    auto copy = alias.is_alias_of(meta->local) ? meta->copy : nullptr;
    LayoutPtr layout = replicated_layout(context_of(like_->spec), alias);
    if (const c10::Device shown = shown_by(alias); shown != layout->device)
      layout = make_layout(layout->spec, layout->strides, layout->offset, layout->dtype, shown);
    install(target, alias, std::move(layout), std::move(copy));
  }
}

at::Tensor ShardedCall::wrap(at::Tensor local, bool view, std::size_t position) {
  if (!local.defined()) return local;
  if (local.layout() != at::kStrided || local.is_nested())
    throw ShardingError(info_.name, " makes a ", local.toString(),
                        " tensor of a sharded one: sparse, nested and mkldnn tensors cannot "
                        "be sharded. Take its value first (tessera::full_tensor).");
  // What a rule has made for a rank without elements.
  if (on_host_ && !elsewhere_ && !local.is_cpu()) local = to_host(local);
  return plan_.mode == ReadyPlan::Mode::replicated
             ? wrap_replicated(std::move(local), view, position)
             : wrap_ruled(std::move(local), view, position);
}

at::Tensor ShardedCall::wrap_replicated(at::Tensor local, bool view, std::size_t position) {
  if (!view && (local.is_conj() || local.is_neg())) {
    const LocalCallGuard guard;
    local = local.resolve_conj().resolve_neg();
  }
  if (position >= plan_.outputs.size()) plan_.outputs.resize(position + 1);
  LayoutPtr& known = plan_.outputs[position].layout;
  const c10::Device shown = shown_by(local);
  std::int64_t offset = local.storage_offset();
  if (view && view_copy_ && view_base_.defined()) {
    // The memory of a copy begins elsewhere than that of its base.
    const ShardMeta& base = *meta_of(view_base_);
    offset += (base.layout->offset - base.local.storage_offset()) *
              static_cast<std::int64_t>(base.local.element_size()) /
              static_cast<std::int64_t>(local.element_size());
  }
  if (!known || local.sizes() != at::IntArrayRef(known->sizes()) ||
      local.strides() != at::IntArrayRef(known->strides) || offset != known->offset ||
      local.scalar_type() != known->dtype || shown != known->device) {
    known = replicated_layout(context_of(like_->spec), local);
    if (shown != known->device || offset != known->offset)
      known = make_layout(known->spec, known->strides, offset, known->dtype, shown);
  }
  at::Tensor t = wrap_shown(std::move(local), known, shown);
  if (view) meta_of(t)->copy = view_copy_;
  if (view && view_of_normal_) as_view_of_normal(t);
  return t;
}

at::Tensor ShardedCall::wrap_ruled(at::Tensor local, bool view, std::size_t position) {
  if (position >= plan_.outputs.size())
    throw RuleError("the rule of ", info_.name, " plans ", plan_.outputs.size(),
                    " outputs, the operator makes more");
  ReadyPlan::Output& out = plan_.outputs[position];
  const c10::Device shown = shown_by(local);
  if (!out.layout) {
    if (!out.spec)
      throw RuleError("the rule of ", info_.name, " gives no spec for result ", position);
    out.layout =
        make_layout(out.spec, out.strides ? *out.strides : contiguous_strides(out.spec.shape()), 0,
                    local.scalar_type(), shown);
  }
  if (local.dim() != out.layout->spec.dims())
    throw RuleError("the rule of ", info_.name, " says that result ", position, " has ",
                    out.layout->spec.dims(), " dims, the operator makes ", local.dim());
  if (!view) {
    if (copied_from_)
      local = copied_from_->copied(copied_index_, *like_, *out.layout,
                                   aligned(std::move(local), *out.layout));
    at::Tensor made = wrap_fresh(std::move(local), out.layout, shown);
    if (out.layout->spec.data()->partial) meta_of(made)->intermediate = true;
    return made;
  }
  at::Tensor t = wrap_shown(std::move(local), out.layout, shown);
  meta_of(t)->copy = view_copy_;
  if (plan_.moves.empty() && out.layout->spec.has_partial()) as_view_of_partial(t, view_base_);
  if (view_of_normal_) as_view_of_normal(t);
  return t;
}

}  // namespace tessera::detail
