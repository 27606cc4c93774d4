#pragma once
// What kernels on sharded tensors are written with: guards of what runs below autograd, how a
// failure on one rank alone is told to the others, what a differentiable function keeps for its
// backward, and the specs of gradients.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Scalar.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

/// Nothing is recorded: autograd has already run on the sharded tensor. Autocast has cast the
/// arguments of an operator that it knows, and sees nothing of what that calls; what one that it
/// does not know is made of it casts, as on one process.
struct BelowAutogradGuard : c10::impl::ExcludeDispatchKeyGuard {
  BelowAutogradGuard()
      : ExcludeDispatchKeyGuard(c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}
};

/// Calls on locals go straight to the device's own kernels.
struct LocalCallGuard : c10::impl::ExcludeDispatchKeyGuard {
  LocalCallGuard()
      : ExcludeDispatchKeyGuard(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                c10::autocast_dispatch_keyset) {}
};

/// Tells the other ranks that `op` cannot continue on this rank, for the reason `what`, before this
/// rank throws an error that they may not see because it depends on what this rank alone holds.
/// They get the error that rethrow_to_all() describes.
void tell_ranks(const std::string& op, const MeshContext& context, const std::string& what);

/// In a catch block: rethrows the exception, with the operator's name if it is a RuleError. Unless
/// it comes from communication itself, the other ranks of this mesh are told first: the pending or
/// next call of each throws PeerFailedError with the reason, and ranks that catch it can go on.
[[noreturn]] void rethrow_to_all(const std::string& op, const MeshContext& context);

/// What `run()` returns, which computes on locals; if it fails the other ranks are told.
template <class Run>
auto on_locals(const char* op, const MeshContext& context, const Run& run) {
  try {
    const LocalCallGuard guard;
    return run();
  } catch (...) {
    rethrow_to_all(op, context);
  }
}

/// Throws InvalidArgument for an undefined or a sharded tensor, ShardingError for one that is not
/// dense, of which no sharded one can be made; `call` is the function that was given it.
void require_plain(const at::Tensor& t, const char* call);

/// The meta of a sharded tensor. Throws InvalidArgument for a plain or undefined tensor.
const ShardMeta& meta_or_throw(const at::Tensor& t);
/// The same, for those that read its local: a view that had to be copied, of a base that has
/// changed since, is taken again. Collective: which views are is known from the program's calls.
const ShardMeta& fresh_meta(const at::Tensor& t);
/// The local of a sharded tensor, else the plain tensor: without history, sharing its memory.
at::Tensor local_values(const at::Tensor& t);

/// What a maximum of nothing is, or, if `least`, a minimum: no value of the dtype is beyond it.
inline at::Scalar neutral(at::ScalarType type, bool least) {
  if (at::isFloatingType(type)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return least ? kInfinity : -kInfinity;
  }
  if (type == at::kBool) return least;
  if (type == at::kByte) return std::int64_t{least ? 255 : 0};
  const std::int64_t most = type == at::kChar    ? std::numeric_limits<std::int8_t>::max()
                            : type == at::kShort ? std::numeric_limits<std::int16_t>::max()
                            : type == at::kInt   ? std::numeric_limits<std::int32_t>::max()
                                                 : std::numeric_limits<std::int64_t>::max();
  return least ? most : -most - 1;
}

template <class Value>
struct Carried : torch::CustomClassHolder {
  explicit Carried(Value v) : value(std::move(v)) {}
  const Value value;
};

/// Stores `value` in the autograd context, so that backward finds it there.
template <class Value>
void carry(torch::autograd::AutogradContext* ctx, Value value, const char* name = "spec") {
  ctx->saved_data[name] =
      c10::IValue::make_capsule(c10::make_intrusive<Carried<Value>>(std::move(value)));
}
/// What carry() has stored under this name; of the same type.
template <class Value = ShardSpec>
Value carried(torch::autograd::AutogradContext* ctx, const char* name = "spec") {
  const auto capsule = ctx->saved_data[name].toCapsule();
  return static_cast<const Carried<Value>&>(*capsule).value;
}

/// The spec of the gradient of a tensor of this spec: never Partial on an axis on which the value
/// is (summed once, it is the gradient of the value of every rank). With `chosen`: these
/// placements; sizes are kept where the same axes shard a dim.
ShardSpec gradient_spec(const ShardSpec& spec,
                        const std::optional<std::vector<Placement>>& chosen = std::nullopt);

/// Makes a plain gradient a replicated one, with the mesh of `like`.
at::Tensor sharded_gradient(const at::Tensor& gradient, const ShardSpec& like);

}  // namespace tessera::detail
