#include "tessera/tensor/dispatch/make_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

std::string describe_inputs(const OpCall& call) {
  std::string text;
  for (const TensorInfo& t : call.tensors()) {
    text += concat(text.empty() ? "" : "; ", call.schema().arguments()[t.argument].name(),
                   t.element >= 0 ? concat("[", t.element, "]") : "", " ", t.spec);
  }
  return text;
}

[[noreturn]] void throw_no_rule(const OpCall& call) {
  throw NoRuleError(
      concat("no sharding rule for ", call.name(), " with inputs ", describe_inputs(call),
             ". Either redistribute the inputs to Replicate first (tessera::redistribute), or "
             "register a rule (tessera::register_rule)."));
}

// `to` is `from` with some of its partial axes reduced.
bool only_reduces(const ShardSpec& from, const ShardSpec& to) {
  auto placements = from.placements();
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (placements[a].is_partial() && to.placements()[a].is_replicate())
      placements[a] = Replicate();
  }
  return from.with_placements(placements) == to;
}

void add_layout(const c10::IValue& v, std::vector<LayoutPtr>& all) {
  if (!v.isTensor() || !v.toTensor().defined()) return;
  if (const auto* meta = meta_of(v.toTensor())) all.push_back(meta->layout);
}

// Where this rank's part of every result is empty the operator has nothing to compute, and some
// kernels refuse to.
void skip_if_nothing(ReadyPlan& ready) {
  std::vector<LayoutPtr> results;
  for (const ReadyPlan::Output& o : ready.outputs) {
    if (!o.layout || o.layout->spec.local_numel() > 0) return;
    results.push_back(o.layout);
  }
  if (results.empty()) return;
  ready.local = [results = std::move(results)](const c10::OperatorHandle&,
                                               const torch::jit::Stack&) {
    torch::jit::Stack made;
    for (const LayoutPtr& l : results)
      made.emplace_back(
          at::empty(l->spec.local_shape(), at::TensorOptions(l->dtype).device(l->device)));
    return made;
  };
}

}  // namespace

ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers) {
  ReadyPlan ready;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (info.kinds[i] == OpInfo::Kind::tensor) add_layout(arguments[i], ready.inputs);
    if ((info.kinds[i] == OpInfo::Kind::tensor_list ||
         info.kinds[i] == OpInfo::Kind::optional_tensor_list) &&
        arguments[i].isList()) {
      for (const c10::IValue& v : arguments[i].toListRef()) add_layout(v, ready.inputs);
    }
  }
  if (info.in_place_view) {
    // on the locals it would change shapes that their wrappers still show
    if (!info.functional) throw_no_rule(OpCall(info, arguments));
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  const auto rule = info.rule();
  if (scan.replicated && !(rule && rule->options.for_replicated)) {
    if (info.random && context_of(scan.first->spec())->mesh.layout().size() > 1) {
      // each rank's own generator would give each rank other numbers
      throw_no_rule(OpCall(info, arguments));
    }
    return ready;
  }
  if (info.out_variant && info.functional && !scan.replicated) {
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  const OpCall call(info, arguments);
  if (!rule) throw_no_rule(call);
  Plan plan = rule->rule(call);
  asked_for_numbers = call.asked_for_numbers();
  if (plan.whole) {
    plan.inputs.clear();
    for (const TensorInfo& t : call.tensors())
      plan.inputs.push_back(
          t.spec.with_placements(std::vector<Placement>(t.spec.placements().size())));
  }
  ready.mode = plan.whole ? ReadyPlan::Mode::replicated : ReadyPlan::Mode::ruled;
  ready.arguments = std::move(plan.arguments);
  if (ready.arguments.size() == 1 && ready.arguments[0].second.isIntList())
    ready.local_sizes = ready.arguments[0].second.toIntVector();
  ready.local = std::move(plan.local);
  ready.view_copied = plan.view_copied;
  if (plan.inputs.size() > call.tensors().size())
    throw RuleError(concat("the rule of ", info.name, " plans ", plan.inputs.size(), " inputs of ",
                           call.tensors().size()));
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const TensorInfo& t = call.tensor(i);
    if (!plan.inputs[i] || *plan.inputs[i] == t.spec) continue;
    if (t.written && !only_reduces(t.spec, *plan.inputs[i])) {
      throw ShardingError(concat(
          info.name, " would change the placement of what it writes to, from ", t.spec, " to ",
          *plan.inputs[i], ". Inputs: ", describe_inputs(call), ". Redistribute it first."));
    }
    const bool announced = !t.parameter && moves_shards(t.spec, *plan.inputs[i]);
    ready.moves.push_back({t.argument, t.element, t.spec, *plan.inputs[i], announced});
    ready.moves_shards |= announced;
  }
  if (plan.whole) return ready;
  if (call.in_place()) {
    // A rule of the functional form says where the result lies; written in place it must lie where
    // the target does.
    const ShardSpec target =
        !plan.inputs.empty() && plan.inputs[0] ? *plan.inputs[0] : call.tensor(0).spec;
    if (!plan.outputs.empty() && plan.outputs[0].spec && !(plan.outputs[0].spec == target)) {
      throw ShardingError(concat(info.name,
                                 " would change the placement of what it writes to, from ",
                                 call.tensor(0).spec, " to ", plan.outputs[0].spec,
                                 ". Inputs: ", describe_inputs(call), ". Redistribute it first."));
    }
    plan.outputs.clear();
  }
  const c10::Device device = scan.first->layout->device;
  const bool stays_parameter =
      scan.first->layout->parameter && (info.view || info.name == "aten::_to_copy");
  std::size_t k = 0;
  for (Plan::Output& out : plan.outputs) {
    ReadyPlan::Output o{nullptr, out.spec, std::move(out.strides)};
    if (out.spec) {
      const auto* inferred = call.outputs();
      if (inferred && k < inferred->size() && (*inferred)[k].defined) {
        const OutputInfo& is = (*inferred)[k];
        // a rule that gives strides as well knows better
        if (is.shape != out.spec.shape() && !o.strides) {
          throw RuleError(concat("the rule of ", info.name, " says that the result has shape ",
                                 list(out.spec.shape()), ", the operator makes ", list(is.shape)));
        }
        o.layout =
            make_layout(out.spec, o.strides ? *o.strides : is.strides, is.offset, is.dtype, device);
        if (stays_parameter) o.layout = as_parameter(o.layout);
      }
    }
    ++k;
    ready.outputs.push_back(std::move(o));
  }
  const bool lists =
      std::any_of(info.returns.begin(), info.returns.end(), [](const auto& r) { return r.list; });
  if (!ready.local && !info.writes && !info.view && !info.random && !lists) skip_if_nothing(ready);
  return ready;
}

}  // namespace tessera::detail
