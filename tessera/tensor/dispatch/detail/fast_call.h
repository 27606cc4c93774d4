#pragma once
// What the fast kernels look at before a call: its key, its tensors, where they lie, and whether
// its plan is one that they run themselves. For fast_kernels.cpp alone.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "tessera/tensor/dispatch/internal/gathered_parameters.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/plan_cache.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::fast {

// Builds what make_key() adds for each argument, without boxing it.
struct KeyBuilder {
  static constexpr std::size_t kWords = 24;
  std::uint64_t words[kWords];
  std::size_t size = 0;
  const ShardMeta* first = nullptr;
  bool usable = true;  // false: an argument that only the boxed path handles
  // Of each tensor argument in order, or the argument itself; valid while no tensor is changed.
  static constexpr std::size_t kTensors = 4;
  const at::Tensor* locals[kTensors];

  // flatten: otherwise meta_of() is a call
  template <class... Arguments>
  [[gnu::flatten]] explicit KeyBuilder(const Arguments&... arguments) {
    (add(arguments), ...);
    usable &= first != nullptr;
    if (first && needs_default_dtype(*first->layout)) {
      push(kDefault);
      push(default_dtype());
    }
  }
  Key key() const { return Key(words, words + size); }

 private:
  [[gnu::always_inline]] void push(std::uint64_t word) {
    if (size == kWords) {
      usable = false;
      return;
    }
    words[size++] = word;
  }
  [[gnu::always_inline]] void add(const at::Tensor& t) {
    const at::Tensor*& local = locals[tensors_++];
    local = &t;
    if (!t.defined()) {
      push(kUndefined);
      return;
    }
    const ShardMeta* meta = meta_of(t);
    if (!meta) {
      usable &= t.unsafeGetTensorImpl()->is_wrapped_number();
      push(kWrapped);
      push(static_cast<std::uint64_t>(t.scalar_type()));
      return;
    }
    local = &meta->local;
    if (!first) first = meta;
    usable &= !meta->copy;
    // tensors of one mesh: no plan is found for others
    push(reinterpret_cast<std::uintptr_t>(meta->layout.get()));
  }
  void add(const at::Scalar& s) {
    push(s.isFloatingPoint()   ? kDouble
         : s.isIntegral(false) ? kInt
         : s.isBoolean()       ? kTrue
                               : kComplex);
  }
  void add(std::int64_t n) {
    push(kInt);
    push(static_cast<std::uint64_t>(n));
  }
  void add(bool b) { push(b ? kTrue : kFalse); }
  void add(at::OptionalIntArrayRef list) {
    if (!list) return push(kNone);
    push(kList);
    push(list->size());
    for (const std::int64_t n : *list) add(n);
  }
  void add(std::optional<at::ScalarType> type) {
    if (!type) return push(kNone);
    add(static_cast<std::int64_t>(*type));
  }
  void add(const c10::SymIntArrayRef& list) {
    push(kList);
    push(list.size());
    for (const c10::SymInt& n : list) {
      if (n.is_heap_allocated()) {
        usable = false;
        return;
      }
      add(n.as_int_unchecked());
    }
  }

  std::size_t tensors_ = 0;
};

// What the local call gets for an argument; `local`: of a tensor.
inline const at::Tensor& argument_of(const at::Tensor&, const at::Tensor* local, const ReadyPlan&) {
  return *local;
}
// For a view: the local sizes, none of them symbolic.
inline c10::SymIntArrayRef argument_of(const c10::SymIntArrayRef& sizes, const at::Tensor*,
                                       const ReadyPlan& plan) {
  return plan.local_sizes ? c10::fromIntArrayRefUnchecked(*plan.local_sizes) : sizes;
}
template <class T>
const T& argument_of(const T& value, const at::Tensor*, const ReadyPlan&) {
  return value;
}

// Without calling memcmp, which takes longer than a few dims do.
inline bool same_dims(at::IntArrayRef a, const Dims& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) return false;
  return true;
}

// What the kernel above autograd must know of the tensors before it continues.
struct Look {
  const ShardMeta* sharded = nullptr;
  bool plain = false;           // something must be promoted
  bool differentiable = false;  // autograd has something to do
  bool attached = false;        // autograd has attached something: tangents are possible

  template <class... Arguments>
  [[gnu::flatten]] explicit Look(const Arguments&... arguments) {
    (see(arguments), ...);
  }

 private:
  [[gnu::always_inline]] void see(const at::Tensor& t) {
    if (!t.defined()) return;
    const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
    const ShardMeta* meta = meta_of(t);
    if (meta && !sharded) sharded = meta;
    plain |= !meta && !impl.is_wrapped_number();
    if (!impl.autograd_meta()) return;
    attached = true;
    differentiable |= impl.requires_grad() && at::GradMode::is_enabled();
  }
  template <class T>
  void see(const T&) {}
};

// True if forward-mode autograd has something to do.
inline bool has_tangent(const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }
template <class T>
bool has_tangent(const T&) {
  return false;
}

// True if only our own kernel is left below autograd: no mode, no functionalization, no lazy bits.
inline bool straight_below(c10::DispatchKeySet keys) {
  return (keys & c10::after_ADInplaceOrView_keyset).highestFunctionalityKey() ==
         c10::DispatchKey::Dense;
}

// True for plans that need nothing but the operator itself on the locals.
inline bool is_simple(const ReadyPlan& plan) {
  return plan.moves.empty() && (plan.arguments.empty() || plan.local_sizes) && !plan.local &&
         !plan.view_copied && plan.mode != ReadyPlan::Mode::by_functional;
}

// True for plans that need nothing more than parameters gathered: Policies::redistribution says
// nothing about that, and no other tensor is to find what was gathered.
inline bool only_gathers(const ReadyPlan& plan) {
  if (plan.moves.empty() || plan.moves_shards || !plan.arguments.empty() || plan.local ||
      plan.view_copied || plan.mode != ReadyPlan::Mode::ruled || plan.outputs.size() != 1 ||
      !plan.outputs[0].layout || plan.outputs[0].layout->parameter)
    return false;
  return std::ranges::all_of(plan.moves, [](const ReadyPlan::Move& move) {
    return move.element < 0 && !move.from.has_partial() && move.from.has_shard();
  });
}

// As the general path gathers it: of a call it may gather some, which it must not do again.
inline at::Tensor gather(const at::Tensor& t, const ShardSpec& to) {
  if (at::Tensor gathered = gathered_by_source(t, to); gathered.defined()) return gathered;
  GatheredParameters* const kept = GatheredParameters::current();
  at::Tensor local = kept ? kept->find(t, to) : at::Tensor();
  if (local.defined()) return local;
  const ShardMeta& meta = *meta_of(t);
  const LocalCallGuard guard;
  local = aligned(redistribute_local(meta.local, meta.spec(), to), *under(*meta.layout, to));
  if (kept) kept->add(t, to, local);
  return local;
}

// Where the tensors of a call lie.
struct Memory {
  bool device = false;  // one shows a device other than the CPU
  bool host = false;    // and its local lies in host memory

  template <class... Arguments>
  explicit Memory(const Arguments&... arguments) {
    (see(arguments), ...);
  }

 private:
  void see(const at::Tensor& t) {
    const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
    if (!meta) return;
    device |= !meta->layout->device.is_cpu();
    host |= in_host_memory(*meta);
  }
  template <class T>
  void see(const T&) {}
};

// The plan of a call on tensors that show the CPU, if it is simple or, with `gathers`, gathers
// parameters; nullptr: the general path handles the call. `on_device`: of tensors some of which
// show another device.
template <bool gathers, bool on_device>
ReadyPlan* find_simple(const OpInfo& info, int number, const KeyBuilder& builder) {
  if (!builder.usable) return nullptr;
  PlanCache& cache = PlanCache::of_thread();
  const std::size_t hash = KeyHash::of(builder.words, builder.size);
  PlanCache::Recent& recent =
      on_device ? cache.recent_on_device(number, hash) : cache.recent(number, hash);
  if (recent.key && KeyEqual::same(*recent.key, builder.words, builder.size)) return recent.plan;
  OpPlans& of = cache.of(info);
  if (of.numbers) return nullptr;
  const auto it = of.plans.find(builder.key());
  if (it == of.plans.end() || it->second.on_device != on_device ||
      !(is_simple(it->second) || (gathers && only_gathers(it->second))))
    return nullptr;
  recent = {&it->first, &it->second};
  return &it->second;
}

}  // namespace tessera::detail::fast
