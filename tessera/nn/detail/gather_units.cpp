#include "tessera/nn/detail/gather_units.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/gradient/internal/hooks.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

at::Tensor place_in(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(flat.storage()), flat.key_set(), flat.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, flat.storage_offset() + offset);
  return made;
}

GatherUnits::GatherUnits(std::shared_ptr<MeshContext> context, std::vector<int> axes,
                         Options options)
    : context_(std::move(context)),
      axes_(std::move(axes)),
      options_(std::move(options)),
      ranks_(context_->mesh.mesh().group(axes_, context_->mesh.manager().rank())),
      failures_(failures_of(context_->mesh.manager(), ranks_)) {
  if (options_.device) uploads_.emplace(*options_.device);
}

std::size_t GatherUnits::add_unit(std::string name, ParameterPrecision precision) {
  Unit unit;
  unit.precision = precision;
  unit.label = concat("gather of unit '", name, "'");
  unit.name = std::move(name);
  units_.push_back(std::move(unit));
  return units_.size() - 1;
}

std::size_t GatherUnits::add_buffer(std::size_t unit, at::Tensor shard, Sizes sizes) {
  const std::int64_t numel = c10::sum_integers(sizes);
  const auto compute = units_[unit].precision.compute;
  at::Tensor low, memory;
  if (compute && *compute != shard.scalar_type()) {
    memory = at::zeros({std::max<std::int64_t>(shard.numel(), 1)},
                       shard.options().dtype(*compute).pinned_memory(options_.pinned));
    low = memory.narrow(0, 0, shard.numel());
  }
  Unit& to = units_[unit];
  to.buffers.push_back(
      {std::move(shard), std::move(low), std::move(memory), std::move(sizes), numel, {}, {}});
  const at::Tensor &first = sent_of(to.buffers.front()), &last = sent_of(to.buffers.back());
  to.bytes += numel * static_cast<std::int64_t>(last.element_size());
  to.alike &= first.scalar_type() == last.scalar_type() && first.device() == last.device();
  return to.buffers.size() - 1;
}

void GatherUnits::add_parameter(std::size_t unit, std::size_t buffer, std::int64_t offset,
                                const at::Tensor& local, std::int64_t sharded_elsewhere) {
  const std::size_t index = places_.size();
  places_.push_back({unit, buffer, offset, sharded_elsewhere});
  if (const auto compute = units_[unit].precision.compute;
      compute && *compute != local.scalar_type())
    add_low(index, local);
  context_->state->sources.add(local, shared_from_this(), index);
}

// The local in the dtype to compute in: a place in the unit's buffer of that dtype, or memory of
// its own. A storage of its own, by which it is known.
void GatherUnits::add_low(std::size_t index, const at::Tensor& local) {
  const Place at = places_[index];
  const Unit& unit = units_[at.unit];
  const at::TensorOptions options = local.options().dtype(*unit.precision.compute);
  at::Tensor made;
  if (at.buffer == kNoBuffer) {
    made = at::empty_strided(local.sizes(), local.strides(), options);
  } else {
    const Buffer& buffer = unit.buffers[at.buffer];
    const auto bytes = static_cast<const char*>(local.const_data_ptr()) -
                       static_cast<const char*>(buffer.shard.const_data_ptr());
    const std::int64_t first =
        local.numel() > 0 ? bytes / static_cast<std::int64_t>(local.element_size()) : 0;
    char* place = static_cast<char*>(buffer.memory.data_ptr()) +
                  first * static_cast<std::int64_t>(buffer.memory.element_size());
    made = at::from_blob(
        place, local.sizes(), local.strides(), [memory = buffer.memory](void*) {}, options);
  }
  places_.push_back({at.unit, at.buffer, at.offset, at.sharded_elsewhere, true});
  places_[index].computed = made;
  places_[index].begin = local.storage_offset();
  context_->state->sources.add(made, shared_from_this(), places_.size() - 1);
}

ParameterPrecision GatherUnits::precision(std::size_t index) const {
  const Place& place = places_[index];
  return place.computed.defined() ? units_[place.unit].precision : ParameterPrecision();
}

at::Tensor GatherUnits::computed(std::size_t index, const ShardMeta& meta) {
  const Place& place = places_[index];
  if (!place.computed.defined() || meta.local.scalar_type() != meta.layout->dtype ||
      meta.local.is_conj() || meta.local.is_neg())
    return {};
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const LocalCallGuard guard;
  const c10::InferenceMode normal(false);
  at::Tensor view = place.computed.as_strided(meta.local.sizes(), meta.local.strides(),
                                              meta.local.storage_offset() - place.begin);
  // What is being gathered has been copied, and what has been written since was released.
  if (place.buffer == kNoBuffer || units_[place.unit].state == Unit::State::sharded)
    view.copy_(meta.local);
  return view;
}

// Whether the unit's buffer has the local under `to` of a parameter, or of a view of it.
bool GatherUnits::gathers(const Place& place, const ShardMeta& meta, const ShardSpec& to) const {
  if (place.sharded_elsewhere == 0) return to.is_replicated();
  // All of its elements in the order of its memory, or it would have to be found among those of the
  // shard.
  const Layout& layout = *meta.layout;
  if (!layout.dense || layout.offset != 0 || to.numel() != place.sharded_elsewhere) return false;
  auto placements = meta.spec().placements();
  for (const int axis : axes_) placements[axis] = Replicate();
  return meta.spec().with_placements(placements) == to;
}

namespace {

// What is replicated over an axis, as one rank's summand of a Partial: sends nothing.
at::Tensor as_summand(at::Tensor view, const Layout& layout, const ShardSpec& whole,
                      const ShardSpec& to) {
  if (whole == to) return view;
  return aligned(redistribute_local(view, whole, to), *under(layout, to));
}

}  // namespace

at::Tensor GatherUnits::gathered(std::size_t index, const ShardMeta& meta, const ShardSpec& to) {
  const Place& place = places_[index];
  if (place.buffer == kNoBuffer) return {};
  const Buffer& buffer = units_[place.unit].buffers[place.buffer];
  const ShardSpec whole = reduced_like(to, meta.spec());
  if (place.low != buffer.low.defined() || !gathers(place, meta, whole) ||
      meta.layout->dtype != sent_of(buffer).scalar_type() || meta.local.is_conj() ||
      meta.local.is_neg())
    return {};
  at::Tensor view;
  {
    const std::lock_guard lock(mutex_);
    view = take(index, *meta.layout, whole);
  }
  return as_summand(std::move(view), *meta.layout, whole, to);
}

at::Tensor GatherUnits::gathered_copy(std::size_t index, std::uint64_t writes,
                                      const ShardMeta& meta, const ShardSpec& to) {
  const Place& place = places_[index];
  const Buffer& buffer = units_[place.unit].buffers[place.buffer];
  const at::ScalarType dtype = meta.layout->dtype;
  const ShardSpec whole = reduced_like(to, meta.spec());
  if ((buffer.low.defined() && buffer.low.scalar_type() != dtype) || !meta.layout->dense ||
      !gathers(place, meta, whole) || meta.local.is_conj() || meta.local.is_neg())
    return {};
  at::Tensor view;
  {
    const std::lock_guard lock(mutex_);
    if (units_[place.unit].writes != writes) return {};
    view = take(index, *meta.layout, whole);
    const LocalCallGuard guard;
    view = view.to(dtype);
  }
  return as_summand(std::move(view), *meta.layout, whole, to);
}

// What the unit's buffer has of a parameter, or of a view of it, gathered now if it is not yet.
// With the mutex held.
at::Tensor GatherUnits::take(std::size_t index, const Layout& layout, const ShardSpec& to) {
  const Place& place = places_[index];
  catch_up();
  visit(index);
  start(place.unit);
  wait(units_[place.unit]);
  const Buffer& buffer = units_[place.unit].buffers[place.buffer];
  // A wrapper shows the strides and the offset that the whole tensor would have: views too.
  at::Tensor view =
      place.sharded_elsewhere == 0
          ? place_in(buffer.full, place.offset + layout.offset, layout.sizes(), layout.strides)
          : place_in(buffer.full, place.offset, to.local_shape(),
                     strides_in_order(to.local_shape(), layout.strides));
  used();
  return view;
}

void GatherUnits::written(std::size_t index) {
  const std::lock_guard lock(mutex_);
  ++units_[places_[index].unit].writes;
  release(places_[index].unit);
}

void GatherUnits::accumulated() {
  const std::lock_guard lock(mutex_);
  catch_up();
  if (pass_ != Pass::backward) begin(Pass::backward);
}

void GatherUnits::hold(std::size_t unit) {
  const std::lock_guard lock(mutex_);
  catch_up();
  start(unit);
  units_[unit].held = true;
}

void GatherUnits::let_go(std::size_t unit) {
  const std::lock_guard lock(mutex_);
  units_[unit].held = false;
  ++units_[unit].writes;  // perhaps past the operators
  release(unit);
}

// ---- the order of use ----

// Before the first use after a failure of one rank alone: on all ranks as if nothing had been used.
// What is held is gathered again when it is used.
void GatherUnits::catch_up() {
  const std::uint64_t failures = failures_of(context_->mesh.manager(), ranks_);
  if (failures == failures_) return;
  failures_ = failures;
  for (std::size_t u = 0; u < units_.size(); ++u) release(u);
  seen_.clear();
  pass_ = Pass::none;
  following_ = false;
  end_ = nullptr;
  for (Order& order : orders_) order = {};
}

void GatherUnits::visit(std::size_t index) {
  const std::size_t unit = places_[index].unit;
  const bool backward = torch::autograd::get_current_graph_task_id() >= 0;
  const std::size_t segments = starts_.size();
  if (pass_ == Pass::none || backward != (pass_ == Pass::backward) ||
      (!backward && (starts_again(index) || repeats(index)))) {
    begin(backward                     ? Pass::backward
          : at::GradMode::is_enabled() ? Pass::forward
                                       : Pass::evaluation);
    first_ = index;
  }
  const bool merges = starts_.size() <= std::max<std::size_t>(segments, 1);
  if (!seen_.empty() && seen_.back().unit == unit && merges) {
    ++seen_.back().uses;
    return;
  }
  if (!seen_.empty()) left();
  const std::size_t at = seen_.size();
  seen_.push_back({unit, 1});
  const auto& visits = order().visits;
  following_ = following_ && at < visits.size() && visits[at].unit == unit;
  if (!following_) return start(unit);
  // This one before those that come next.
  for (std::size_t next = at, end = ahead_of(at); next < end; ++next) start_from(next);
}

// Whether a forward begins with this use, though none has ended: nothing tells of its end where no
// backward follows.
bool GatherUnits::starts_again(std::size_t index) const {
  if (seen_.empty() || places_[index].unit != seen_.front().unit) return false;
  const bool grad = pass_ == Pass::forward;
  if (at::GradMode::is_enabled() != grad && index == first_) return true;
  if (!following_) return false;
  const std::size_t at = seen_.size();
  const auto& visits = order().visits;
  const bool same = seen_.back().unit == seen_.front().unit;
  if (at == visits.size()) return !same || seen_.back().uses >= visits.back().uses;
  // what an exception has ended, unless the order says so
  return !same && visits[at].unit != seen_.front().unit;
}

// Forwards without a backward that go no learnt way: the order is what has come twice between uses
// of the parameter that was used first. Two of them belong to one forward where the first and the
// last layer are tied.
bool GatherUnits::repeats(std::size_t index) {
  constexpr std::size_t kMostSeen = 4096;
  if (following_ || pass_ == Pass::backward) return false;
  if (seen_.size() >= kMostSeen) {  // nothing comes again
    end(false);
    return true;
  }
  if (index != first_ || seen_.size() < starts_.back() + 2) return false;
  starts_.push_back(seen_.size());
  const std::size_t last = starts_.size() - 1;
  const auto at = [&](std::size_t segment) {
    return seen_.begin() + static_cast<std::ptrdiff_t>(starts_[segment]);
  };
  for (std::size_t period = 1; period <= 2 && 2 * period <= last; ++period) {
    if (!std::equal(at(last - 2 * period), at(last - period), at(last - period), at(last)))
      continue;
    order() = {{at(last - period), at(last)}, true};
    end(false);
    return true;
  }
  return false;
}

void GatherUnits::begin(Pass pass) {
  end(true);
  pass_ = pass;
  if (pass == Pass::evaluation && !order().learnt)
    order() = orders_[static_cast<int>(Pass::forward)];
  starts_.assign(1, 0);
  following_ = order().learnt;
  if (pass != Pass::backward) return;
  end_ = at_end_of_backward([weak = weak_from_this()](const void* of, bool completed) {
    const auto units = weak.lock();
    if (!units) return;
    const std::lock_guard lock(units->mutex_);
    if (units->end_ == of) units->end(completed);
  });
}

void GatherUnits::end(bool learn) {
  if (learn && !seen_.empty() && !(following_ && seen_ == order().visits)) order() = {seen_, true};
  // The backward that follows a forward goes on with what that has left.
  const bool forward = pass_ == Pass::forward;
  const bool backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (!(forward && backward)) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (!units_[u].held) release(u);
    }
  }
  seen_.clear();
  pass_ = Pass::none;
  end_ = nullptr;
}

// Whether the unit that was visited last is needed again before it may be gathered anew.
bool GatherUnits::comes_again() const {
  const std::size_t unit = seen_.back().unit;
  const bool reshard = options_.reshard_after_forward;
  const auto& visits = order().visits;
  const std::size_t at = following_ ? seen_.size() : visits.size();
  const auto next = visits.begin() + static_cast<std::ptrdiff_t>(at);
  const auto is_it = [&](const Visit& v) { return v.unit == unit; };
  // It would be started again when the next unit is used.
  if (std::any_of(next, visits.begin() + static_cast<std::ptrdiff_t>(ahead_of(at)), is_it))
    return true;
  switch (pass_) {
    case Pass::forward: {
      if (!reshard) return true;
      const Order& backward = orders_[static_cast<int>(Pass::backward)];
      return following_ && next == visits.end() && backward.learnt &&
             backward.visits.front().unit == unit;
    }
    case Pass::backward: {
      if (reshard) return false;
      return !following_ || std::any_of(next, visits.end(), is_it);
    }
    default:
      return false;
  }
}

// Whether what was visited last is to be gathered over the smaller group the next time.
bool GatherUnits::stays_near() const {
  if (options_.kept_axes.empty()) return false;
  if (pass_ != Pass::backward) return pass_ == Pass::forward;
  const auto& visits = order().visits;
  return following_ &&
         std::any_of(visits.begin() + static_cast<std::ptrdiff_t>(seen_.size()), visits.end(),
                     [&](const Visit& v) { return v.unit == seen_.back().unit; });
}

// Another unit is used from now on.
void GatherUnits::left() {
  const std::size_t unit = seen_.back().unit;
  if (units_[unit].held || comes_again()) return;
  if (stays_near()) {
    keep_near(unit);
  } else {
    release(unit);
  }
}

// What is learnt to be the last use takes the buffer with it.
void GatherUnits::used() {
  if (following_ && seen_.back().uses == order().visits[seen_.size() - 1].uses) left();
}

}  // namespace tessera::detail
