#include "tessera/tensor/detail/fast_kernels.h"

#include <ATen/Operators.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "tessera/tensor/detail/execute.h"
#include "tessera/tensor/detail/failure.h"
#include "tessera/tensor/detail/layout.h"
#include "tessera/tensor/detail/no_dispatch.h"
#include "tessera/tensor/detail/plan_cache.h"
#include "tessera/tensor/detail/promote.h"
#include "tessera/tensor/detail/view_replay.h"

namespace tessera::detail {

namespace {

// What make_key() adds for each argument, without boxing it.
struct KeyBuilder {
  Key key;
  const ShardMeta* first = nullptr;
  bool usable = true;  // false: something that only the boxed way deals with

  void add(const at::Tensor& t) {
    if (!t.defined()) {
      key.push_back(kUndefined);
      return;
    }
    const ShardMeta* meta = meta_of(t);
    if (!meta) {
      usable &= t.unsafeGetTensorImpl()->is_wrapped_number();
      key.push_back(kWrapped);
      key.push_back(static_cast<std::uint64_t>(t.scalar_type()));
      return;
    }
    if (!first) {
      first = meta;
    } else {
      usable &= first->layout->spec.data()->context == meta->layout->spec.data()->context;
    }
    usable &= !meta->copy;
    key.push_back(reinterpret_cast<std::uintptr_t>(meta->layout.get()));
  }
  void add(const at::Scalar& s) { key.push_back(s.isFloatingPoint() ? kDouble : s.isIntegral(false) ? kInt : s.isBoolean() ? kTrue : kComplex); }
  void add(std::int64_t n) {
    key.push_back(kInt);
    key.push_back(static_cast<std::uint64_t>(n));
  }
  void add(bool b) { key.push_back(b ? kTrue : kFalse); }
  void add(c10::SymIntArrayRef list) {
    key.push_back(kList);
    key.push_back(list.size());
    for (const c10::SymInt& n : list) {
      if (n.is_heap_allocated()) {
        usable = false;
        return;
      }
      add(n.as_int_unchecked());
    }
  }
  void add(at::IntArrayRef list) {
    key.push_back(kList);
    key.push_back(list.size());
    for (const auto n : list) add(n);
  }
};

const at::Tensor& local_of(const at::Tensor& t) {
  const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
  return meta ? meta->local : t;
}
const at::Tensor& local_of(const at::Tensor& t, const ReadyPlan&) { return local_of(t); }
// Of a view: the local sizes.
c10::SymIntArrayRef local_of(const c10::SymIntArrayRef& sizes, const ReadyPlan& plan) {
  return plan.local_sizes ? c10::fromIntArrayRefSlow(*plan.local_sizes) : sizes;
}
template <class T>
const T& local_of(const T& value, const ReadyPlan&) {
  return value;
}

bool is_plain_argument(const at::Tensor& t) { return is_plain(t); }
template <class T>
bool is_plain_argument(const T&) {
  return false;
}

// Only plans that need nothing but the operator itself on the locals.
ReadyPlan* find_simple(const OpInfo& info, const Key& key) {
  OpPlans& of = PlanCache::of_thread().of(info);
  if (of.numbers) return nullptr;
  const auto it = of.plans.find(key);
  if (it == of.plans.end()) return nullptr;
  ReadyPlan& plan = it->second;
  return plan.moves.empty() && (plan.arguments.empty() || plan.local_sizes) && !plan.local && !plan.view_copied &&
                 plan.mode != ReadyPlan::Mode::by_functional
             ? &plan
             : nullptr;
}

template <class Op, class Schema>
struct Kernels;

// One instance for each operator of libtorch's own table. The info is set when the kernels are registered, and never again.
template <class Op, class Result, class... Arguments>
struct Kernels<Op, Result(Arguments...)> {
  static inline const OpInfo* info = nullptr;
  static constexpr bool kInPlace = std::is_same_v<Result, at::Tensor&>;

  static Result boxed(Arguments... arguments) {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    run_sharded(*info, &stack);
    if constexpr (kInPlace) {
      return first(arguments...);
    } else {
      return std::move(stack.back()).toTensor();
    }
  }

  template <class First, class... Rest>
  static First& first(First& f, Rest&...) {
    return f;
  }

  static Result below(c10::DispatchKeySet, Arguments... arguments) {
    KeyBuilder builder;
    (builder.add(arguments), ...);
    ReadyPlan* plan = builder.usable && builder.first ? find_simple(*info, builder.key) : nullptr;
    if (!plan) return boxed(arguments...);
    if constexpr (kInPlace) {
      at::Tensor local = local_of(first(arguments...));
      guarded(*plan, builder, [&] { call_in_place(*plan, local, arguments...); });
      return first(arguments...);
    } else {
      at::Tensor local = guarded(*plan, builder, [&] { return Op::call(local_of(arguments, *plan)...); });
      // A result that is not as planned (an operator's data-dependent choice) is left to the general way.
      if (plan->outputs.size() == 1 && plan->outputs[0].layout && !local.is_conj() && !local.is_neg()) {
        const Layout& layout = *plan->outputs[0].layout;
        const bool as_planned =
            plan->mode == ReadyPlan::Mode::ruled || (local.strides() == at::IntArrayRef(layout.strides) && local.storage_offset() == layout.offset);
        if (as_planned && local.scalar_type() == layout.dtype && local.sizes() == at::IntArrayRef(layout.spec.local_shape())) {
          if (plan->mode == ReadyPlan::Mode::ruled && !info->view) return wrap_fresh(std::move(local), plan->outputs[0].layout);
          return wrap(std::move(local), plan->outputs[0].layout);
        }
      }
      return boxed(arguments...);
    }
  }

  // Of replicated tensors a failure is the same on all ranks.
  template <class Call>
  static auto guarded(const ReadyPlan& plan, const KeyBuilder& builder, Call call) {
    const LocalCallGuard guard;
    try {
      return call();
    } catch (...) {
      if (plan.mode == ReadyPlan::Mode::replicated) throw;
      rethrow_to_all(info->name, *context_of(builder.first->spec()));
    }
  }

  template <class First, class... Rest>
  static void call_in_place(const ReadyPlan& plan, at::Tensor& local, First&, Rest&... rest) {
    Op::call(local, local_of(rest, plan)...);
  }

  static Result above(c10::DispatchKeySet keys, Arguments... arguments) {
    if ((is_plain_argument(arguments) || ...)) {
      torch::jit::Stack stack;
      torch::jit::push(stack, arguments...);
      if (promote_stack(stack)) {
        return std::apply([&](auto&&... promoted) -> Result { return onward(keys, promoted...); }, from_stack(stack, arguments...));
      }
    }
    return onward(keys, arguments...);
  }

  static bool promote_stack(torch::jit::Stack& stack) {
    for (const c10::IValue& v : stack) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      if (const ShardMeta* meta = meta_of(v.toTensor())) {
        promote_arguments(*info, stack.data(), context_of(meta->spec()), true);
        return true;
      }
    }
    return false;
  }

  // Tensors from the stack, everything else as it was given.
  template <class T>
  static T pick(const c10::IValue&, T given) {
    return given;
  }
  static at::Tensor pick(const c10::IValue& v, const at::Tensor&) { return v.toTensor(); }
  static at::Tensor& pick(const c10::IValue&, at::Tensor& given) { return given; }  // promoted where it stands

  static auto from_stack(const torch::jit::Stack& stack, Arguments... arguments) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::tuple<decltype(pick(stack[0], arguments))...>{pick(stack[I], arguments)...};
    }(std::index_sequence_for<Arguments...>{});
  }

  template <class... Given>
  static Result onward(c10::DispatchKeySet keys, Given&&... given) {
    const auto rest = keys.remove(c10::DispatchKey::AutogradFunctionality).remove(c10::DispatchKey::ZeroTensor).add(c10::DispatchKey::AutogradOther);
    const ViewReplay replay(info->view);
    return Op::redispatch(rest, given...);
  }
};

using Registration = void (*)(const OpInfo*, const char*, torch::Library&, torch::Library&);

template <class Op>
void add(const OpInfo* info, const char* name, torch::Library& below, torch::Library& above) {
  using K = Kernels<Op, typename Op::schema>;
  K::info = info;
  below.impl(name, torch::CppFunction::makeFromUnboxedFunction(&K::below));
  above.impl(name, torch::CppFunction::makeFromUnboxedFunction(&K::above));
}

const std::map<std::string, Registration>& fast_operators() {
  using namespace at::_ops;
  static const std::map<std::string, Registration> all = {
      {"aten::add.Tensor", add<add_Tensor>},
      {"aten::add_.Tensor", add<add__Tensor>},
      {"aten::sub.Tensor", add<sub_Tensor>},
      {"aten::mul.Tensor", add<mul_Tensor>},
      {"aten::mul_.Tensor", add<mul__Tensor>},
      {"aten::div.Tensor", add<div_Tensor>},
      {"aten::div_.Tensor", add<div__Tensor>},
      {"aten::addcmul_", add<addcmul_>},
      {"aten::addcdiv_", add<addcdiv_>},
      {"aten::sqrt", add<at::_ops::sqrt>},
      {"aten::neg", add<neg>},
      {"aten::exp", add<at::_ops::exp>},
      {"aten::relu", add<relu>},
      {"aten::sigmoid", add<sigmoid>},
      {"aten::tanh", add<at::_ops::tanh>},
      {"aten::threshold_backward", add<threshold_backward>},
      {"aten::mm", add<mm>},
      {"aten::bmm", add<bmm>},
      {"aten::addmm", add<addmm>},
      {"aten::t", add<t>},
      {"aten::transpose.int", add<transpose_int>},
      {"aten::view", add<view>},
      {"aten::detach", add<detach>},
  };
  return all;
}

}  // namespace

bool register_fast_kernels(const std::string& name, const std::shared_ptr<const OpInfo>& info, torch::Library& below, torch::Library& above) {
  const auto it = fast_operators().find(name);
  if (it == fast_operators().end()) return false;
  it->second(info.get(), name.c_str() + 6, below, above);
  return true;
}

}  // namespace tessera::detail
