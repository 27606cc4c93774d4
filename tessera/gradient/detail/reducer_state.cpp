#include "tessera/gradient/detail/reducer_state.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/internal/hooks.h"

namespace tessera {

std::optional<double> GradientReducer::State::scale(const at::Tensor& parameter) const {
  const auto at = index.find(parameter.unsafeGetTensorImpl());
  if (at == index.end()) return std::nullopt;
  const Entry& entry = parameters[at->second];
  const auto scale = scale_of(entry.op, entry.group.size());
  if (entry.op.kind != ReduceOp::Kind::avg) return scale;
  const std::lock_guard lock(mutex);
  if (!entry.form) return scale;
  if (entry.form->mixed) return std::nullopt;
  // The mean of complete gradients counts each loss that ranks share once.
  return *scale * entry.form->copies;
}

std::vector<int> GradientReducer::State::ranks(const at::Tensor& parameter) const {
  const auto at = index.find(parameter.unsafeGetTensorImpl());
  return at == index.end() ? std::vector<int>() : parameters[at->second].group.ranks();
}

// Which of a mean's gradients are complete on several ranks, and which are each rank's own.
void GradientReducer::State::note_form(Entry& entry) {
  if (!entry.form) return;
  MeanForm& form = *entry.form;
  const int copies =
      form.backward == torch::autograd::get_current_graph_task_id() ? form.announced : 1;
  form.mixed = entry.pending && (form.mixed || form.copies != copies);
  form.copies = copies;
}

void GradientReducer::State::receives(const at::Tensor& parameter, GradientForm form,
                                      const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex);
  const auto at = index.find(parameter.unsafeGetTensorImpl());
  if (at == index.end()) return;
  Entry& entry = parameters[at->second];
  if (access(at->second).uniform()) return;  // sharded: it knows what its gradient is
  const int shared = detail::shared_ranks(ranks, entry.group.ranks());
  if (shared < 2) return;
  const bool partial = form == GradientForm::partial;
  const auto refuse = [&](std::string_view what) {
    throw GradientError("the gradient of parameter '", entry.name, "' ", what, " (", shared,
                        " ranks of group '", entry.group.name(),
                        "'). Give another ReducedParameter::op, or "
                        "DistributedDataParallelOptions::reduction: ReduceOp::sum where "
                        "sharded tensors are made of what ranks compute (from_local), "
                        "ReduceOp::avg where they take replicated values, "
                        "ReduceOp::premultiplied(w) to weight it by hand.");
  };
  if (partial && entry.op.kind == ReduceOp::Kind::avg)
    refuse("is a part of a sum on each rank, and its mean would be too small by their number");
  if (!partial && entry.op.kind == ReduceOp::Kind::sum)
    refuse("is complete on each rank, and its sum would be too large by their number");
  if (entry.op.kind == ReduceOp::Kind::avg) {
    // Before the first announcement gradients were each rank's own.
    if (!entry.form) entry.form.emplace();
    entry.form->backward = torch::autograd::get_current_graph_task_id();
    entry.form->announced = shared;
  }
  if (entry.op.kind != ReduceOp::Kind::premultiplied) return;
  auto& known = entry.announced;
  const int backward_now = torch::autograd::get_current_graph_task_id();
  // What a backward announced that failed before it accumulated anything is forgotten.
  const bool accumulated = entry.pending && parameter.grad().defined();
  std::erase_if(known, [&](const Announcement& a) {
    return a.backward != backward_now && (!accumulated || (a.form == form && a.ranks == ranks));
  });
  for (const Announcement& a : known)
    if (a.form != form && detail::shared_ranks(a.ranks, ranks) > 1)
      refuse("is partly a part of a sum and partly complete, which no one reduction joins");
  known.push_back({form, ranks, backward_now});
}

at::Tensor GradientReducer::State::accumulating(std::size_t i, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex);
  Entry& entry = parameters[i];
  const at::Tensor parameter = entry.tensor();
  if (!parameter.defined() || !detail::accumulates_into(parameter)) return gradient;
  entry.came = true;
  const bool weighted = entry.op.kind == ReduceOp::Kind::premultiplied;
  if (!weighted &&
      detail::averaged_above(entry.group.ranks(),
                             torch::autograd::impl::gradient_edge(parameter).function.get()))
    throw GradientError(
        "the gradient of parameter '", entry.name, "' is summed over group '", entry.group.name(),
        "', but comes from a mean_loss that is scaled for a mean over its ranks: it would "
        "be too large by their number. Give mean_loss the operation ReduceOp::sum, or use "
        "DistributedDataParallel::mean_loss, which does.");
  if (entry.reduced && !entry.pending && !entry.first() && parameter.grad().defined())
    access(i).start_from_nothing(parameter);
  return weighted ? gradient * entry.op.factor : gradient;
}

void GradientReducer::State::accumulated(std::size_t i) {
  const std::lock_guard lock(mutex);
  Entry& entry = parameters[i];
  // libtorch says so of an undefined gradient too, which adds nothing. It would make no difference
  // to a mean.
  const bool adds = entry.came || !entry.sums();
  entry.came = false;
  if (adds) {
    note_form(entry);
    entry.pending = true;
  }
  if (!sync) return;
  if (!open) begin();
  Bucket& bucket = buckets[entry.bucket];
  if (entry.fired) {
    if (!adds) return;
    if (bucket.started && bucket.uniform) {
      late = true;
      return;
    }
    if (bucket.started)
      throw InvalidArgument("the gradient of parameter '", entry.name,
                            "' was accumulated a second time in one backward, after its "
                            "reduction had started (a nested backward, such as reentrant "
                            "checkpointing). Give ReducerOptions::overlap = false, which "
                            "reduces at the end of backward.");
    return;
  }
  entry.fired = true;
  if (--bucket.missing == 0) arrival.push_back(entry.bucket);
  if (!options.overlap) return;
  while (next < buckets.size() && buckets[order[next]].missing == 0) start(buckets[order[next++]]);
}

// After a failure sharded parameters go on over groups that are made anew. One rank may have learnt
// an order that others have not.
void GradientReducer::State::forget_order() {
  if (!options.learn_order || buckets.empty() || !buckets.front().uniform ||
      !has_ended(buckets.front().group))
    return;
  std::iota(order.begin(), order.end(), std::size_t{0});
  learnt = false;
}

void GradientReducer::State::begin() {
  forget_order();
  open = true;
  // A nested backward reduces what it has; the rest follows when the outer one ends.
  backward = detail::at_end_of_backward([weak = weak_from_this()](const void* of, bool completed) {
    const auto state = weak.lock();
    if (!state) return;
    const std::lock_guard lock(state->mutex);
    if (completed && state->open) state->finish();
    if (!completed && state->backward == of) state->abandon();
  });
}

// Buckets that have started are completed, as on the other ranks, so that groups stay in step and
// no packed gradient is lost. The others are left as backward left them.
void GradientReducer::State::abandon() {
  if (!open) return;
  try {
    for (Bucket& bucket : buckets) {
      if (!bucket.started) continue;
      bucket.request.wait();
      write_back(bucket);
    }
  } catch (const std::exception& e) {  // another one is on its way already
    TORCH_WARN("gradients of a backward that failed could not be reduced: ", e.what());
    leave_shared_memory();
  }
  for (Entry& entry : parameters) entry.came = false;
  reset();
}

// One message for each set of ranks, which is known only now.
void GradientReducer::State::start_uniform(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bucket.started = true;
  for (const Slot& slot : bucket.slots) {
    const at::Tensor parameter = parameters[slot.parameter].tensor();
    if (!parameter.defined()) continue;
    UnreducedGradient gradient =
        access(slot.parameter).unreduced(parameter, parameters[slot.parameter].group);
    if (!gradient.value.defined()) continue;
    auto message = std::ranges::find_if(
        bucket.messages, [&](const detail::BucketMessage& m) { return m.takes(gradient); });
    if (message == bucket.messages.end())
      message = bucket.messages.emplace(bucket.messages.end(), gradient, bucket.op);
    message->add(slot.parameter, std::move(gradient));
  }
  bucket.scatters = std::ranges::any_of(
      bucket.messages, [](const detail::BucketMessage& m) { return m.scatters(); });
  if (bucket.scatters) make_room_for(bucket);
  for (detail::BucketMessage& message : bucket.messages) {
    message.pack();
    for (const auto& item : message.items())
      if (const at::Tensor parameter = parameters[item.parameter].tensor(); parameter.defined())
        access(item.parameter).packed(parameter);
    message.start();
  }
}

// Gradients that are reduce-scattered have the full shape. Those in progress are waited for, the
// first ones first, until they and the next are a small message together, so that backward holds
// few of them. All ranks come to the same answer: the bytes are those of the global tensors.
void GradientReducer::State::make_room_for(const Bucket& bucket) {
  constexpr std::int64_t kInProgress = 64 << 10;
  const auto earlier = [&](const auto& call) {
    for (std::size_t b = 0; b < next; ++b) {
      Bucket& other = buckets[order[b]];
      if (&other != &bucket && other.scatters && !other.messages.empty()) call(other);
    }
  };
  std::int64_t bytes = bucket.bytes;
  earlier([&](const Bucket& other) { bytes += other.scattered ? 0 : other.bytes; });
  earlier([&](Bucket& other) {
    if (other.scattered) {
      complete(other);
    } else if (bytes > kInProgress) {
      for (detail::BucketMessage& message : other.messages) message.next();
      other.scattered = true;
      bytes -= other.bytes;
    }
  });
}

void GradientReducer::State::complete(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  for (detail::BucketMessage& message : bucket.messages) message.next();
  for (detail::BucketMessage& message : bucket.messages) {
    message.wait();
    for (const auto& item : message.items()) {
      Entry& entry = parameters[item.parameter];
      const at::Tensor parameter = entry.tensor();
      if (parameter.defined()) access(item.parameter).store(parameter, item.reduced, true);
      entry.pending = false;
    }
  }
  bucket.messages.clear();
}

void GradientReducer::State::start(Bucket& bucket) {
  if (bucket.uniform) return start_uniform(bucket);
  const at::NoGradGuard no_grad;
  const auto slots = static_cast<std::int64_t>(bucket.slots.size());
  if (!bucket.flat.defined()) {
    const auto form = bucket.slots.front().like.options();
    bucket.flat = bucket.memory ? bucket.memory.empty({bucket.numel + slots}, form)
                                : at::empty({bucket.numel + slots}, form);
    // Not views to autograd: a gradient that is one could not be detached in place, which
    // Optimizer::zero_grad does.
    for (Slot& slot : bucket.slots)
      slot.part = at::empty({0}, bucket.flat.options())
                      .set_(bucket.flat.storage(), slot.offset, slot.like.sizes(),
                            c10::contiguous_strides(slot.like.sizes()));
  }
  for (const Slot& slot : bucket.slots) {
    Entry& entry = parameters[slot.parameter];
    at::Tensor part = slot.part;
    const at::Tensor parameter = entry.tensor();
    // A sum that has been reduced already, and that nothing was added to, is contributed by one
    // rank.
    const bool counted = entry.reduced && !entry.pending && entry.sums() && !entry.first();
    const at::Tensor mine = parameter.defined() && !counted
                                ? access(slot.parameter).unreduced(parameter, bucket.group).value
                                : at::Tensor();
    if (mine.defined() && mine.layout() != at::kStrided)
      throw InvalidArgument(
          "the gradient of parameter '", entry.name, "' has layout ", mine.layout(),
          "; only dense gradients are reduced (make the embedding with sparse = false)");
    if (mine.defined() && mine.sizes() != slot.like.sizes())
      throw GradientError("the gradient of parameter '", entry.name, "' has shape ", mine.sizes(),
                          " here, and ", slot.like.sizes(),
                          " is what is reduced: it has not become the parameter's own yet, "
                          "or the parameter has changed since its reducer was made");
    if (!mine.defined())
      part.zero_();
    else if (bucket.factor != 1.0)
      at::mul_out(part, mine, at::scalar_tensor(bucket.factor, mine.options().device(at::kCPU)));
    else if (mine.data_ptr() != part.data_ptr() || !mine.is_contiguous())
      part.copy_(mine);
    // A gradient that has been released since contributes nothing.
    if (!mine.defined()) entry.pending = false;
  }
  // Filled where they lie: a copy of host memory would make the host wait for the device.
  const at::Tensor flags = bucket.flat.narrow(0, bucket.numel, slots).fill_(1);
  for (std::int64_t s = 0; s < slots; ++s)
    if (!parameters[bucket.slots[s].parameter].pending) flags.narrow(0, s, 1).zero_();
  bucket.started = true;
  bucket.request = bucket.group.started().all_reduce(bucket.flat, bucket.op, {.name = "gradients"});
}

void GradientReducer::State::write_back(Bucket& bucket) {
  if (bucket.uniform) return complete(bucket);
  const at::NoGradGuard no_grad;
  // The flags are read only where they matter: reading them makes the host wait for the device.
  const bool all_used_here = std::ranges::all_of(
      bucket.slots, [&](const Slot& s) { return parameters[s.parameter].pending; });
  at::Tensor flags;
  if (!all_used_here)
    flags = at::real(
                bucket.flat.narrow(0, bucket.numel, static_cast<std::int64_t>(bucket.slots.size())))
                .to(at::kCPU, at::kDouble)
                .contiguous();
  for (std::size_t s = 0; s < bucket.slots.size(); ++s) {
    const Slot& slot = bucket.slots[s];
    if (flags.defined() && flags.const_data_ptr<double>()[s] == 0.0) continue;
    Entry& entry = parameters[slot.parameter];
    const at::Tensor parameter = entry.tensor();
    if (parameter.defined())
      access(slot.parameter).store(parameter, slot.part, options.gradient_as_bucket_view);
    entry.pending = false;
    entry.reduced = true;
  }
}

void GradientReducer::State::finish() {
  try {
    require_earlier_alike();
    for (const auto& weak : earlier) {
      const auto inner = weak.lock();
      if (!inner) continue;
      const std::lock_guard lock(inner->mutex);
      if (inner->open) inner->finish();
    }
    while (next < buckets.size()) start(buckets[order[next++]]);
    for (const std::size_t b : order) {
      buckets[b].request.wait();
      write_back(buckets[b]);
    }
    learn();
    if (late) {
      late = false;
      for (Bucket& bucket : buckets) {
        if (!bucket.uniform) continue;
        start(bucket);
        complete(bucket);
      }
    }
  } catch (...) {
    leave_shared_memory();
    reset();
    throw;
  }
  reset();
}

// After a failure another rank may be late in a reduction that has been given up here, and may
// still write a block of its result.
void GradientReducer::State::leave_shared_memory() {
  for (Bucket& bucket : buckets) {
    if (!bucket.memory) continue;
    bucket.memory = SharedMemory();
    bucket.flat = at::Tensor();
    for (Slot& slot : bucket.slots) slot.part = at::Tensor();
  }
}

// Large buckets are reduced where they lie, in memory that the ranks of their group share.
void GradientReducer::State::share_memory(const Group& group) {
  constexpr std::int64_t kLarge = 64 << 10, kAlignment = 64;
  if (!SharedMemory::available(group)) return;
  std::int64_t bytes = 0;
  std::vector<Bucket*> large;
  for (Bucket& bucket : buckets) {
    if (bucket.uniform || !(bucket.group == group)) continue;
    const at::Tensor& like = bucket.slots.front().like;
    const auto size = (bucket.numel + static_cast<std::int64_t>(bucket.slots.size())) *
                      static_cast<std::int64_t>(like.element_size());
    if (!like.is_cpu() || size < kLarge) continue;
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    large.push_back(&bucket);
  }
  if (large.empty()) return;
  try {
    const SharedMemory memory = SharedMemory::make(group, bytes);
    for (Bucket* bucket : large) bucket->memory = memory;
  } catch (const NotAvailable& error) {
    TORCH_WARN("gradients of group '", group.name(),
               "' are copied to be reduced, since its ranks get no memory in common for them: ",
               error.what());
  }
}

// After a reduction, until one has followed a backward on the first rank: all ranks are here, and
// all see the same bytes.
void GradientReducer::State::learn() {
  if (!options.learn_order || learnt || buckets.size() < 2) return;
  if (buckets.front().uniform && arrival.empty()) return;
  if (!arrival.empty())
    for (const std::size_t b : order)
      if (std::ranges::find(arrival, b) == arrival.end()) arrival.push_back(b);
  Bucket& first = buckets.front();
  if (first.uniform && has_ended(first.group)) {
    for (const Slot& slot : first.slots) {
      const at::Tensor p = parameters[slot.parameter].tensor();
      if (!p.defined()) continue;
      const UnreducedGradient gradient = access(slot.parameter).unreduced(p, first.group);
      if (!gradient.value.defined()) first.group = gradient.group;
    }
  }
  auto of_first = agree::first<std::vector<std::size_t>>(
      first.group, "order of buckets", [&] { return arrival; }, {.name = "order of buckets"});
  if (of_first.size() != order.size()) return;
  order = std::move(of_first);
  learnt = true;
}

void GradientReducer::State::reset() {
  arrival.clear();
  for (Bucket& bucket : buckets) {
    bucket.missing = bucket.slots.size();
    bucket.started = bucket.scatters = bucket.scattered = false;
    bucket.request = Request();
    bucket.messages.clear();
  }
  for (Entry& entry : parameters) {
    entry.fired = false;
    entry.announced.clear();
  }
  next = 0;
  late = false;
  open = false;
  backward = nullptr;
}

}  // namespace tessera
