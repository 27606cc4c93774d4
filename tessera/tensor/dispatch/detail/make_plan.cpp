#include "tessera/tensor/dispatch/detail/make_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "tessera/base/text.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

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
      "no sharding rule for ", call.name(), " with inputs ", describe_inputs(call),
      ". Either redistribute the inputs to Replicate first (tessera::redistribute), or "
      "register a rule (tessera::register_rule); from Python tessera.redistribute, or "
      "tessera.register_rule.");
}

// Of an operator that draws, whatever the placements.
[[noreturn]] void throw_no_draw(const OpCall& call) {
  throw NoRuleError("no sharding rule for ", call.name(), " with inputs ", describe_inputs(call),
                    ": it draws random numbers, and the ranks' own generators would give "
                    "each rank others. Draw plain tensors, alike on all ranks, and "
                    "distribute them (tessera::distribute_tensor), or register a rule "
                    "(tessera::register_rule).");
}

// True if `to` is `from` with some of its partial axes reduced; `scattered`: or reduced to shards.
bool only_reduces(const ShardSpec& from, const ShardSpec& to, bool scattered) {
  if (!scattered) return reduced_like(from, to) == to;
  for (std::size_t a = 0; a < from.placements().size(); ++a) {
    const Placement& p = from.placements()[a];
    if (!p.is_partial() && !(p == to.placements()[a])) return false;
  }
  return true;
}

// If this rank's shard of every result is empty the operator has nothing to compute, and some
// kernels refuse that. Returns whether it is.
bool skip_if_nothing(ReadyPlan& ready) {
  std::vector<LayoutPtr> results;
  for (const ReadyPlan::Output& o : ready.outputs) {
    if (!o.layout || o.layout->spec.local_numel() > 0) return false;
    results.push_back(o.layout);
  }
  if (results.empty()) return false;
  ready.local = [results = std::move(results)](const c10::OperatorHandle&,
                                               const torch::jit::Stack&) {
    torch::jit::Stack made;
    for (const LayoutPtr& l : results)
      made.emplace_back(
          at::empty(l->spec.local_shape(), at::TensorOptions(l->dtype).device(l->device)));
    return made;
  };
  return true;
}

// The layouts whose addresses are in the key; a plan keeps them alive.
std::vector<LayoutPtr> layouts_of(const OpInfo& info, at::ArrayRef<c10::IValue> arguments) {
  std::vector<LayoutPtr> all;
  each_tensor(info, arguments.data(), [&](const at::Tensor& t, int, int) {
    if (const ShardMeta* meta = meta_of(t)) all.push_back(meta->layout);
  });
  return all;
}

// Lets the operator check its arguments before a rule looks at them: a rule need not handle what
// the operator refuses.
void require_possible(const OpInfo& info, const OpCall& call, c10::Device device) {
  // The memory that it may reach beyond the tensor is not known to a stand-in.
  if (info.op.schema().name().starts_with("aten::as_strided")) return;
  // Rules count the tensors of a list.
  for (std::size_t i = 0; i < info.kinds.size(); ++i) {
    if (info.kinds[i] != OpInfo::Kind::tensor_list || !call.arguments()[i].isList()) continue;
    for (const c10::IValue& t : call.arguments()[i].toListRef())
      if (!t.isTensor() || !t.toTensor().defined())
        throw InvalidArgument(info.name, ": a tensor of ", info.op.schema().arguments()[i].name(),
                              " is undefined");
  }
  call.outputs();
  require_dtypes(info, call.arguments(), call.tensors(), device);
}

// Of integers there is no negative power and no quotient by zero: the number itself decides whether
// the operator throws, which a rank without elements would not see.
bool numbers_may_fail(const OpInfo& info, const OpCall& call) {
  static constexpr std::array<std::string_view, 10> kOperators = {
      "aten::pow",       "aten::pow_",       "aten::div",  "aten::div_",  "aten::floor_divide",
      "aten::remainder", "aten::remainder_", "aten::fmod", "aten::fmod_", "aten::floor_divide_"};
  const at::ScalarType type = call.tensor(0).dtype;
  return !at::isFloatingType(type) && !at::isComplexType(type) &&
         std::ranges::find(kOperators, info.op.schema().name()) != kOperators.end();
}

[[noreturn]] void throw_moves_target(const OpCall& call, const ShardSpec& from,
                                     const ShardSpec& to) {
  throw ShardingError(call.name(), " would change the placement of what it writes to, from ", from,
                      " to ", to, ". Inputs: ", describe_inputs(call), ". Redistribute it first.");
}

std::vector<std::optional<ShardSpec>> gathered_inputs(const OpCall& call) {
  std::vector<std::optional<ShardSpec>> all;
  for (const TensorInfo& t : call.tensors()) all.emplace_back(replicated(t.spec));
  return all;
}

// True if a parameter is gathered over an axis on which the other inputs are summands: where data
// is sharded it was sharded to be gathered, there it was not.
bool gathered_for_summands(const OpCall& call, const TensorInfo& t, const ShardSpec& to) {
  for (std::size_t a = 0; a < to.placements().size(); ++a) {
    if (!t.spec.placements()[a].is_shard() || to.placements()[a].is_shard()) continue;
    bool shards = false, summands = false;
    for (const TensorInfo& other : call.tensors()) {
      if (&other == &t) continue;
      shards |= other.spec.placements()[a].is_shard();
      summands |= other.spec.placements()[a].is_partial();
    }
    if (summands && !shards) return true;
  }
  return false;
}

// Whether the parameter's unit is gathered over every axis over which `to` gathers it.
bool unit_gathers(const Layout& layout, const ShardSpec& to) {
  if (!layout.unit_axes) return false;
  for (int a = 0; a < static_cast<int>(to.placements().size()); ++a)
    if (!(layout.spec.placements()[a] == to.placements()[a]) &&
        std::ranges::find(*layout.unit_axes, a) == layout.unit_axes->end())
      return false;
  return true;
}

// Sharded parameters are, but not over the axis along which their layer's data are sharded: it is
// the data that the layer gathers there.
bool gathered_silently(const OpCall& call, const TensorInfo& t, const ShardSpec& to) {
  if (!t.parameter) return false;
  const c10::IValue& v = call.arguments()[t.argument];
  const ShardMeta* meta = t.element < 0 && v.isTensor() ? meta_of(v.toTensor()) : nullptr;
  if (meta && unit_gathers(*meta->layout, to)) return true;
  if (gathered_for_summands(call, t, to)) return false;
  if (!meta || !meta->layout->sequence) return true;
  const int axis = meta->layout->sequence.axis;
  return to.placements()[axis] == t.spec.placements()[axis];
}

void plan_moves(const OpCall& call, const Plan& plan, ReadyPlan& ready) {
  if (plan.inputs.size() > call.tensors().size())
    throw RuleError("the rule of ", call.name(), " plans ", plan.inputs.size(), " inputs of ",
                    call.tensors().size());
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const TensorInfo& t = call.tensor(i);
    if (!plan.inputs[i] || *plan.inputs[i] == t.spec) continue;
    // What an operator on lists writes beside its first list is a gradient, or state of a step.
    const bool beside = t.argument > 0 && t.element >= 0;
    if (t.written && !only_reduces(t.spec, *plan.inputs[i], beside))
      throw_moves_target(call, t.spec, *plan.inputs[i]);
    const bool announced =
        !gathered_silently(call, t, *plan.inputs[i]) && moves_shards(t.spec, *plan.inputs[i]);
    ready.moves.push_back({t.argument, t.element, t.spec, *plan.inputs[i], announced});
    ready.moves_shards |= announced;
  }
}

// A rule of the functional form determines the placement of the result; an operator in place
// requires that of the target.
void require_target_stays(const OpCall& call, const Plan& plan) {
  const ShardSpec target =
      !plan.inputs.empty() && plan.inputs[0] ? *plan.inputs[0] : call.tensor(0).spec;
  if (!plan.outputs.empty() && plan.outputs[0].spec && !(plan.outputs[0].spec == target))
    throw_moves_target(call, call.tensor(0).spec, plan.outputs[0].spec);
}

// The results that are not arguments; nullptr: not known.
const std::vector<OutputInfo>* inferred_results(const OpInfo& info, const OpCall& call) {
  const bool written =
      std::ranges::any_of(info.returns, [](const auto& r) { return r.argument >= 0; });
  return written ? nullptr : call.outputs();
}

void plan_outputs(const OpInfo& info, const OpCall& call, const Layout& like, Plan& plan,
                  ReadyPlan& ready) {
  const auto* inferred = inferred_results(info, call);
  const bool stays_parameter = like.parameter && (info.view || info.name == "aten::_to_copy");
  for (std::size_t k = 0; k < plan.outputs.size(); ++k) {
    Plan::Output& out = plan.outputs[k];
    ReadyPlan::Output o{nullptr, out.spec, std::move(out.strides)};
    if (out.spec && inferred && k < inferred->size() && (*inferred)[k].defined) {
      const OutputInfo& is = (*inferred)[k];
      // a rule that gives strides as well knows the shape better
      if (is.shape != out.spec.shape() && !o.strides) {
        throw RuleError("the rule of ", info.name, " says that the result has shape ",
                        list(out.spec.shape()), ", the operator makes ", list(is.shape));
      }
      o.layout = make_layout(out.spec, o.strides ? *o.strides : is.strides, is.offset, is.dtype,
                             like.device);
      // a weight that is cast or transposed is still that of its layer, another view of it is not
      const bool whole = !info.view || info.name == "aten::t" || info.name == "aten::transpose.int";
      if (stays_parameter) {
        ParameterMarks marks = like.marks();
        if (!whole) marks.sequence = {};
        o.layout = marked(o.layout, marks);
      }
    }
    ready.outputs.push_back(std::move(o));
  }
}

void plan_by_rule(const OpInfo& info, const OpCall& call, const Rule& rule, const Layout& like,
                  ReadyPlan& ready) {
  require_possible(info, call, like.device);
  Plan plan = rule(call);
  if (plan.gathered) plan.inputs = gathered_inputs(call);
  ready.mode = plan.gathered ? ReadyPlan::Mode::replicated : ReadyPlan::Mode::ruled;
  ready.arguments = std::move(plan.arguments);
  if (ready.arguments.size() == 1 && ready.arguments[0].second.isIntList())
    ready.local_sizes = ready.arguments[0].second.toIntVector();
  ready.local = std::move(plan.local);
  ready.view_copied = plan.view_copied;
  plan_moves(call, plan, ready);
  if (plan.gathered) return;
  if (call.in_place()) {
    require_target_stays(call, plan);
    ready.local = with_finite_factors(call, plan, std::move(ready.local));
    return;
  }
  plan_outputs(info, call, like, plan, ready);
  const bool lists = std::ranges::any_of(info.returns, [](const auto& r) { return r.list; });
  if (!ready.local && !info.writes && !info.view && !info.random && !lists &&
      skip_if_nothing(ready))
    return;
  ready.local = with_finite_factors(call, plan, std::move(ready.local));
}

// The plan that gathers everything, in place of the rule.
ReadyPlan gathered_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments) {
  ReadyPlan ready;
  ready.inputs = layouts_of(info, arguments);
  ready.once = true;
  ready.view_copied = info.view;
  const OpCall call(info, arguments);
  Plan plan;
  plan.inputs = gathered_inputs(call);
  plan_moves(call, plan, ready);
  return ready;
}

void require_strided(const OpInfo& info, at::ArrayRef<c10::IValue> arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (info.op.schema().arguments()[i].name() == "layout" && arguments[i].isInt() &&
        arguments[i].toLayout() != at::kStrided)
      throw ShardingError(info.name, ": a sharded tensor is strided, and has no other layout");
}

ReadyPlan strict_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                      bool& asked_for_numbers) {
  ReadyPlan ready;
  ready.inputs = layouts_of(info, arguments);
  require_strided(info, arguments);
  const OpCall call(info, arguments);
  if (info.in_place_view) {
    // on the locals it would change shapes that their wrappers still show
    if (!info.functional) throw_no_rule(call);
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  // Each rank's own generator would draw other numbers: the rule knows whether any are drawn.
  const bool draws = info.random && context_of(scan.first->spec())->mesh.mesh().size() > 1;
  const auto rule = info.rule();
  if (scan.replicated && !(rule && (rule->options.for_replicated || draws))) {
    if (draws) throw_no_draw(call);
    return ready;
  }
  if (info.out_variant && !scan.replicated) {
    if (!info.functional) throw_no_rule(call);
    call.outputs();
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  if (!rule && draws) throw_no_draw(call);
  if (!rule) throw_no_rule(call);
  plan_by_rule(info, call, rule->rule, *scan.first->layout, ready);
  asked_for_numbers = call.asked_for_numbers() || numbers_may_fail(info, call);
  return ready;
}

// "aten::mm of [4, 8], [8, 3]": global shapes, so that all ranks say the same.
std::shared_ptr<const CallOrigin> origin_of(const OpInfo& info, const ReadyPlan& plan) {
  if (plan.moves.empty() && !plan.local) return nullptr;
  std::string text = info.name == "aten::_local_scalar_dense" ? "item()" : info.name;
  // Whether autograd adds gradients in place depends on what else refers to them on this rank.
  const std::size_t end = std::min(text.find('.'), text.size());
  if (text[end - 1] == '_') text.erase(end - 1, 1);
  constexpr std::size_t kShown = 6;
  std::size_t tensors = 0;
  for (const LayoutPtr& layout : plan.inputs)
    if (++tensors <= kShown) text += concat(tensors == 1 ? " of " : ", ", list(layout->sizes()));
  if (tensors > kShown) text += concat(" and ", tensors - kShown, " more");
  return std::make_shared<const CallOrigin>(std::move(text));
}

}  // namespace

ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers) {
  const auto completed = [&](ReadyPlan plan) {
    plan.on_device = std::ranges::any_of(
        plan.inputs, [](const LayoutPtr& l) { return l && !l->device.is_cpu(); });
    plan.origin = origin_of(info, plan);
    return plan;
  };
  try {
    return completed(strict_plan(info, arguments, scan, asked_for_numbers));
  } catch (const ShardingError& refusal) {
    RankState& state = *context_of(scan.first->spec())->state;
    {
      const std::lock_guard lock(state.mutex);
      if (!state.refusals || info.writes || info.random) throw;
      state.refusals->push_back({info.name, refusal.what()});
    }
    return completed(gathered_plan(info, arguments));
  }
}

}  // namespace tessera::detail
