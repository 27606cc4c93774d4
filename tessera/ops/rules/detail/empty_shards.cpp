#include "tessera/ops/rules/detail/empty_shards.h"

#include <ATen/ops/zeros.h>

#include <utility>

namespace tessera::detail {

namespace {

bool empty_here(const OpCall& call, const Plan& plan) {
  for (std::size_t i = 0; i < call.tensors().size(); ++i) {
    const ShardSpec& spec =
        i < plan.inputs.size() && plan.inputs[i] ? *plan.inputs[i] : call.tensor(i).spec;
    if (spec.local_numel() == 0 && spec.numel() > 0) return true;
  }
  return false;
}

}  // namespace

Rule guarded(Rule rule) {
  return [rule = std::move(rule)](const OpCall& call) {
    Plan plan = rule(call);
    if (plan.gathered || call.in_place() || !empty_here(call, plan)) return plan;
    struct Made {
      std::vector<std::int64_t> shape;
      std::optional<at::ScalarType> dtype;
      bool defined;
    };
    std::vector<Made> made;
    const auto* known = call.outputs();
    for (std::size_t o = 0; o < plan.outputs.size(); ++o) {
      const ShardSpec& spec = plan.outputs[o].spec;
      if (!spec) {
        made.push_back({{}, std::nullopt, false});
        continue;
      }
      // the rank has a value here: the kernel must compute it
      if (spec.local_numel() > 0 && !spec.has_partial()) return plan;
      made.push_back({spec.local_shape(),
                      known && o < known->size() ? std::optional((*known)[o].dtype) : std::nullopt,
                      true});
    }
    plan.local = [made](const c10::OperatorHandle&, torch::jit::Stack arguments) {
      at::TensorOptions options;
      for (const c10::IValue& v : arguments) {
        if (v.isTensor() && v.toTensor().defined()) {
          options = v.toTensor().options();
          break;
        }
      }
      torch::jit::Stack results;
      for (const Made& m : made) {
        results.emplace_back(m.defined
                                 ? at::zeros(m.shape, m.dtype ? options.dtype(*m.dtype) : options)
                                 : at::Tensor());
      }
      return results;
    };
    return plan;
  };
}

}  // namespace tessera::detail
