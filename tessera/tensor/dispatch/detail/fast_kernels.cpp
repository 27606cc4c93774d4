#include "tessera/tensor/dispatch/detail/make_plan.h"

#include <ATen/Operators.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/tensor/dispatch/detail/fast_call.h"
#include "tessera/tensor/dispatch/detail/promote_view.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

using namespace fast;

template <class Op, class Schema>
struct Kernels;

// One instance for each operator of libtorch's own table. The info is set when the kernels are
// registered, and never changed.
template <class Op, class Result, class... Arguments>
struct Kernels<Op, Result(Arguments...)> {
  static inline const OpInfo* info = nullptr;
  static inline int number = 0;
  static constexpr bool kInPlace = std::is_same_v<Result, at::Tensor&>;
  static constexpr bool kView =
      std::string_view(Op::schema_str).find("(a)") != std::string_view::npos;
  static constexpr bool kGathers = !kInPlace && !kView;
  static constexpr bool kDetach = std::is_same_v<Op, at::_ops::detach>;
  // An operator on one tensor never casts a parameter.
  static constexpr bool kCasts = (std::is_same_v<std::decay_t<Arguments>, at::Tensor> + ...) > 1;

  static Result boxed(Arguments... arguments) {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    run_sharded(*info, &stack);
    if constexpr (kInPlace)
      return first(arguments...);
    else
      return std::move(stack.back()).toTensor();
  }

  template <class First, class... Rest>
  static First& first(First& f, Rest&...) {
    return f;
  }

  template <class T>
  static constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;
  static constexpr std::size_t kTensors = (std::size_t{is_tensor<Arguments>} + ...);
  static_assert(kTensors <= KeyBuilder::kTensors);
  // Which of the tensors argument `I` is; kTensors: none.
  template <std::size_t I>
  static constexpr std::size_t tensor_at() {
    constexpr bool tensors[] = {is_tensor<Arguments>...};
    std::size_t before = 0;
    for (std::size_t i = 0; i < I; ++i) before += tensors[i];
    return tensors[I] ? before : kTensors;
  }
  using Indices = std::index_sequence_for<Arguments...>;

  // The operator on `locals`, those of its tensors.
  template <std::size_t... I>
  static at::Tensor call(const ReadyPlan& plan, const at::Tensor* const* locals,
                         std::index_sequence<I...>, Arguments... arguments) {
    return Op::call(argument_of(
        arguments, tensor_at<I>() < kTensors ? locals[tensor_at<I>()] : nullptr, plan)...);
  }

  // The plan, unless a local lies in host memory.
  static const ReadyPlan* find(const KeyBuilder& builder, const Arguments&... arguments) {
    if (const ReadyPlan* plan = find_simple<kGathers, false>(*info, number, builder)) [[likely]]
      return plan;
    const Memory memory(arguments...);
    if (!memory.device || memory.host) return nullptr;
    return find_simple<kGathers, true>(*info, number, builder);
  }

  // Runs the operator on the locals. Undefined: the result is not as planned (an operator's
  // data-dependent choice), and the general path handles the call; never where parameters were
  // gathered, which all ranks do once.
  static Result run(const ReadyPlan& plan, const KeyBuilder& builder, Arguments... arguments) {
    if constexpr (kInPlace) {
      at::Tensor local = *builder.locals[0];
      guarded(plan, builder,
              [&] { call_in_place(plan, local, builder.locals, Indices(), arguments...); });
      RankState& state = *context_of(builder.first->spec())->state;
      if (state.copies.any()) state.copies.wrote(local, nullptr);
      if (state.sources.any()) state.sources.wrote(local);
      return first(arguments...);
    } else {
      at::Tensor local;
      if constexpr (kGathers) {
        if (!plan.moves.empty()) local = gather_and_call(plan, builder, arguments...);
      }
      if (!local.defined())
        local = guarded(plan, builder,
                        [&] { return call(plan, builder.locals, Indices(), arguments...); });
      if (plan.outputs.size() != 1 || !plan.outputs[0].layout) return {};
      const LayoutPtr& layout = plan.outputs[0].layout;
      if (local.is_conj() || local.is_neg() || local.scalar_type() != layout->dtype ||
          !same_dims(local.sizes(), layout->spec.local_shape())) {
        if constexpr (kGathers) {
          if (!plan.moves.empty()) return wrap_unplanned(plan, builder, std::move(local));
        }
        return {};
      }
      if (plan.mode == ReadyPlan::Mode::ruled) {
        if constexpr (kView) {
          at::Tensor view = wrap_checked(std::move(local), layout);
          if (layout->spec.data()->partial) as_view_of_partial(view, first(arguments...));
          return view;
        }
        at::Tensor made = same_dims(local.strides(), layout->local_strides)
                              ? wrap_checked(std::move(local), layout)
                              : wrap_fresh(std::move(local), layout);
        const bool partial = layout->spec.data()->partial;
        if (partial) meta_of(made)->intermediate = true;
        return made;
      }
      if (!same_dims(local.strides(), layout->strides) || local.storage_offset() != layout->offset)
        return {};
      return wrap_checked(std::move(local), layout);
    }
  }

  // The result of a plan that gathers, as the general path makes one of it.
  static at::Tensor wrap_unplanned(const ReadyPlan& plan, const KeyBuilder& builder,
                                   at::Tensor local) {
    const LayoutPtr& layout = plan.outputs[0].layout;
    at::Tensor made = guarded(plan, builder, [&] { return wrap_fresh(std::move(local), layout); });
    if (layout->spec.has_partial()) meta_of(made)->intermediate = true;
    return made;
  }

  // To gather may fail, or wait for other ranks, which learn of a failure by themselves.
  static at::Tensor gather_and_call(const ReadyPlan& plan, const KeyBuilder& builder,
                                    Arguments... arguments) {
    const at::Tensor* tensors[sizeof...(Arguments)] = {tensor_in(arguments)...};
    // By position of the argument.
    std::array<at::Tensor, sizeof...(Arguments)> gathered;
    {
      const WithoutHostLock released;
      const OriginScope scope(plan.origin);
      for (const ReadyPlan::Move& move : plan.moves) {
        const at::Tensor& t = *tensors[move.argument];
        at::Tensor& local = gathered[move.argument];
        for (const ReadyPlan::Move* before = plan.moves.data(); before != &move; ++before)
          if (tensors[before->argument]->is_same(t) && before->to == move.to)
            local = gathered[before->argument];
        if (!local.defined()) raising([&] { local = gather(t, move.to); });
      }
    }
    const at::Tensor* locals[kTensors] = {};
    std::size_t at = 0;
    for (std::size_t i = 0; i < sizeof...(Arguments); ++i) {
      if (!tensors[i]) continue;
      const ShardMeta* meta = tensors[i]->defined() ? meta_of(*tensors[i]) : nullptr;
      locals[at++] = gathered[i].defined() ? &gathered[i] : meta ? &meta->local : tensors[i];
    }
    return guarded(plan, builder, [&] { return call(plan, locals, Indices(), arguments...); });
  }
  static const at::Tensor* tensor_in(const at::Tensor& t) { return &t; }
  template <class T>
  static const at::Tensor* tensor_in(const T&) {
    return nullptr;
  }

  static Result below(c10::DispatchKeySet, Arguments... arguments) {
    if constexpr (kDetach) {
      if (meta_of(arguments...)) return another(arguments..., true);
    }
    const KeyBuilder builder(arguments...);
    if constexpr (kCasts) {
      // In inference mode nothing has run above.
      if (builder.first && casts_parameters(*builder.first) && c10::InferenceMode::is_enabled())
        return boxed(arguments...);
    }
    if (const ReadyPlan* plan = find(builder, arguments...)) {
      if constexpr (kInPlace) {
        return run(*plan, builder, arguments...);
      } else {
        at::Tensor result = run(*plan, builder, arguments...);
        if (result.defined()) {
          if constexpr (kView) {
            if (!first(arguments...).is_inference()) as_view_of_normal(result);
          }
          return result;
        }
      }
    }
    return boxed(arguments...);
  }

  // For replicated tensors a failure is the same on all ranks.
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

  template <std::size_t Target, std::size_t... I>
  static void call_in_place(const ReadyPlan& plan, at::Tensor& local,
                            const at::Tensor* const* locals, std::index_sequence<Target, I...>,
                            Arguments... arguments) {
    const auto given = std::forward_as_tuple(arguments...);
    Op::call(local,
             argument_of(std::get<I>(given),
                         tensor_at<I>() < kTensors ? locals[tensor_at<I>()] : nullptr, plan)...);
  }

  // The result of detach(): the meta is immutable, so that two tensors may share it.
  static at::Tensor another(const at::Tensor& t, bool metadata_may_change) {
    const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
    return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), metadata_may_change));
  }

  static Result above(c10::DispatchKeySet keys, Arguments... arguments) {
    const Look look(arguments...);
    if constexpr (kCasts) {
      if (look.sharded && casts_parameters(*look.sharded)) {
        torch::jit::Stack stack;
        torch::jit::push(stack, arguments...);
        if (const ParameterCasts casts = cast_arguments(*info, stack.data()); casts.any) {
          return std::apply(
              [&](auto&&... cast) -> Result {
                if constexpr (kInPlace)
                  return above(keys, cast...);
                else
                  return cast_result(above(keys, cast...), casts);
              },
              from_stack(stack, arguments...));
        }
      }
    }
    if (look.plain) {
      torch::jit::Stack stack;
      torch::jit::push(stack, arguments...);
      if (const auto targets = promote_stack(stack)) {
        return after_promotion(*targets, [&]() -> Result {
          return std::apply([&](auto&&... promoted) -> Result { return onward(keys, promoted...); },
                            from_stack(stack, arguments...));
        });
      }
    } else if ((kDetach || !look.differentiable) && straight_below(keys) &&
               !(look.attached && (has_tangent(arguments) || ...))) {
      // If autograd would only pass the call on, its kernels are skipped.
      if constexpr (kDetach) {
        return another(arguments..., false);
      } else if constexpr (kView) {
        const ViewReplay replay(true);
        return Op::redispatch(keys & c10::after_autograd_keyset, arguments...);
      } else {
        const KeyBuilder builder(arguments...);
        if (const ReadyPlan* plan = find(builder, arguments...)) {
          if constexpr (kInPlace) {
            run(*plan, builder, arguments...);
            if (keys.has(c10::DispatchKey::ADInplaceOrView))
              first(arguments...).unsafeGetTensorImpl()->bump_version();
            return first(arguments...);
          } else {
            at::Tensor result = run(*plan, builder, arguments...);
            if (result.defined()) return result;
          }
        }
      }
    }
    return onward(keys, arguments...);
  }

  static std::optional<PromotedTargets> promote_stack(torch::jit::Stack& stack) {
    for (const c10::IValue& v : stack) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      if (const ShardMeta* meta = meta_of(v.toTensor())) {
        std::optional<PromotedTargets> promoted;
        raising([&] {
          promoted.emplace(promote_arguments(*info, stack.data(), context_of(meta->spec()), true));
        });
        return promoted;
      }
    }
    return std::nullopt;
  }

  // Takes tensors from the stack, and everything else as it was given.
  template <class T>
  static T pick(const c10::IValue&, T given) {
    return given;
  }
  static at::Tensor pick(const c10::IValue& v, const at::Tensor&) { return v.toTensor(); }
  // promoted in place
  static at::Tensor& pick(const c10::IValue&, at::Tensor& given) { return given; }

  static auto from_stack(const torch::jit::Stack& stack, Arguments... arguments) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::tuple<decltype(pick(stack[0], arguments))...>{pick(stack[I], arguments)...};
    }(std::index_sequence_for<Arguments...>{});
  }

  template <class... Given>
  static Result onward(c10::DispatchKeySet keys, Given&&... given) {
    const auto rest = keys.remove(c10::DispatchKey::AutogradFunctionality)
                          .remove(c10::DispatchKey::ZeroTensor)
                          .add(c10::DispatchKey::AutogradOther);
    if constexpr (kView) {
      const ViewReplay replay(true);
      return Op::redispatch(rest, given...);
    } else {
      return Op::redispatch(rest, given...);
    }
  }
};

using Registration = void (*)(const OpInfo*, int, const char*, torch::Library&, torch::Library&);

template <class Op>
void add(const OpInfo* info, int number, const char* name, torch::Library& below,
         torch::Library& above) {
  using K = Kernels<Op, typename Op::schema>;
  K::info = info;
  K::number = number;
  below.impl(name, torch::CppFunction::makeFromUnboxedFunction(&K::below));
  above.impl(name, torch::CppFunction::makeFromUnboxedFunction(&K::above));
}

template <class... Ops>
std::map<std::string, Registration> registrations() {
  return {{concat(Ops::name, *Ops::overload_name ? "." : "", Ops::overload_name), add<Ops>}...};
}

const std::map<std::string, Registration>& fast_operators() {
  using namespace at::_ops;
  static const auto all =
      registrations<add_Tensor, add__Tensor, add_Scalar, add__Scalar, sub_Tensor, mul_Tensor,
                    mul__Tensor, mul_Scalar, mul__Scalar, div_Tensor, div__Tensor, div_Scalar,
                    div__Scalar, addcmul_, addcdiv_, at::_ops::sqrt, neg, at::_ops::exp, relu,
                    sigmoid, at::_ops::tanh, threshold_backward, sum_dim_IntList, mm, bmm, addmm, t,
                    transpose_int, view, detach>();
  return all;
}

}  // namespace

bool register_fast_kernels(const std::string& name, const std::shared_ptr<const OpInfo>& info,
                           torch::Library& below, torch::Library& above) {
  const auto it = fast_operators().find(name);
  if (it == fast_operators().end()) return false;
  const auto number = static_cast<int>(std::distance(fast_operators().begin(), it));
  TORCH_INTERNAL_ASSERT(number < PlanCache::kKernels);
  it->second(info.get(), number, name.c_str() + 6, below, above);
  return true;
}

}  // namespace tessera::detail
