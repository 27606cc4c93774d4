// Fused steps of optimizers, and the check that gradient scaling makes on gradients: lists of
// tensors, each with its own placements.

#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::optimizer_rules {

namespace {

// Element j of every list has the spec of parameter j; steps, rates and scales are replicated.
std::vector<std::optional<ShardSpec>> like_parameters(const OpCall& call) {
  std::vector<const TensorInfo*> parameters;
  for (const TensorInfo& t : call.tensors()) {
    if (t.argument == 0) parameters.push_back(&t);
  }
  std::vector<std::optional<ShardSpec>> inputs;
  for (const TensorInfo& t : call.tensors()) {
    const bool alike = t.element >= 0 && t.element < static_cast<int>(parameters.size()) &&
                       t.spec.shape() == parameters[t.element]->spec.shape();
    inputs.emplace_back(alike ? without_partial(parameters[t.element]->spec) : replicated(t.spec));
  }
  return inputs;
}

Plan fused(const OpCall& call) {
  Plan plan;
  plan.inputs = like_parameters(call);
  return plan;
}

// Each rank checks its shards; whether any value is not finite is known when all ranks have.
Plan non_finite_check_and_unscale(const OpCall& call) {
  Plan plan;
  plan.inputs = like_parameters(call);
  std::vector<int> axes;
  for (std::size_t a = 0; a < call.mesh().mesh().axes().size(); ++a) {
    for (const auto& spec : plan.inputs) {
      if (!spec->placements()[a].is_shard()) continue;
      axes.push_back(static_cast<int>(a));
      break;
    }
  }
  plan.local = [over = OverRanks{context_of(call.tensor(0).spec), axes, "found_inf"}](
                   const OperatorHandle& op, Stack a) {
    const at::Tensor found = a[1].toTensor();
    op.callBoxed(a);
    if (!over.axes.empty()) found.copy_(over(found.clone(), ReduceOp::max));
    return Stack{};
  };
  return plan;
}

const AtStart registered([] {
  register_rules(
      {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"},
      fused);
  register_rule("aten::_amp_foreach_non_finite_check_and_unscale_", non_finite_check_and_unscale);
});

}  // namespace

}  // namespace tessera::detail::optimizer_rules
