#pragma once
// Helpers shared by the differentiable functions on sharded tensors: what a node of the graph
// keeps, and the specs of gradients.

#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

/// The meta of a sharded tensor. Throws InvalidArgument for a plain or undefined tensor.
const ShardMeta& meta_or_throw(const at::Tensor& t);
/// The same, for those that read its local: a view that had to be copied, of a base that has
/// changed since, is taken again. Collective: which views are is known from the program's calls.
const ShardMeta& fresh_meta(const at::Tensor& t);

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
