// Pointwise operators, with broadcasting: every dim may be sharded. Partial values stay Partial in
// operators that are linear.

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::elementwise_rules {
namespace {

// Labels count the result's dims.
LabelProblem broadcast(const OpCall& call) {
  LabelProblem p(call);
  std::vector<std::int64_t> shape;
  const auto* inferred = call.in_place() ? nullptr : call.outputs();
  // outputs that are written in place say nothing about new results
  if (inferred && inferred->empty()) inferred = nullptr;
  if (inferred) {
    shape = (*inferred)[0].shape;
  } else if (call.in_place()) {
    shape = call.tensor(0).spec.shape();
  } else {
    for (const TensorInfo& t : call.tensors()) broadcast_with(shape, t.spec.shape());
  }
  for (const TensorInfo& t : call.tensors()) p.inputs.push_back(broadcast_labels(call, t, shape));
  const std::size_t outputs = inferred ? inferred->size() : call.schema().returns().size();
  p.outputs.assign(outputs, all_labels(static_cast<std::int64_t>(shape.size())));
  if (!inferred) p.output_shapes.assign(outputs, shape);
  return p;
}

Plan pointwise(const OpCall& call) {
  Plan plan = solve(broadcast(call));
  if (call.outputs() || call.in_place()) return plan;
  // Without a meta kernel: as the loop over the elements would make them.
  at::TensorIteratorConfig loop;
  loop.set_check_mem_overlap(false).check_all_same_dtype(false).check_all_same_device(false);
  loop.declare_static_dtype_and_device(call.tensor(0).dtype, c10::kMeta)
      .add_owned_output(at::Tensor());
  for (const TensorInfo& t : call.tensors())
    loop.add_owned_const_input(at::detail::empty_strided_meta(t.spec.shape(), t.strides, t.dtype));
  const std::vector<std::int64_t> strides = loop.build().output().strides().vec();
  for (Plan::Output& out : plan.outputs)
    if (out.spec) out.strides = strides;
  return plan;
}

// Its result is row-major whatever the input is.
Plan log_sigmoid(const OpCall& call) {
  Plan plan = pointwise(call);
  for (Plan::Output& out : plan.outputs)
    if (out.spec) out.strides = contiguous_strides(out.spec.shape());
  return plan;
}

// True if all its tensor arguments are sharded tensors, none a wrapped number: then a sum of
// summands can be split over ranks.
bool tensors_only(const OpCall& call) {
  std::size_t given = 0;
  for (const c10::IValue& v : call.arguments()) given += v.isTensor() && v.toTensor().defined();
  return given == call.tensors().size();
}

Plan linear_together(const OpCall& call) {
  LabelProblem p = broadcast(call);
  p.linear_together = tensors_only(call) && all_summands_keep_type(call);
  return solve(p);
}

// The two arguments of a product or a quotient, if one is Partial and the other a number, which may
// be a tensor without dims.
struct PartialAndNumber {
  int partial, number;
};
std::optional<PartialAndNumber> partial_and_number(const OpCall& call, const Plan& plan) {
  const auto& tensors = call.tensors();
  for (std::size_t i = 0; i < tensors.size() && i < 2; ++i) {
    if (!plan.inputs[i] || !plan.inputs[i]->has_partial() || tensors[i].argument > 1) continue;
    const std::size_t other = 1 - i;
    if (tensors.size() == 1 || (tensors[other].spec.dims() == 0 && plan.inputs[other] &&
                                plan.inputs[other]->is_replicated()))
      return PartialAndNumber{tensors[i].argument, 1 - tensors[i].argument};
  }
  return std::nullopt;
}

// 1 if it is not known without waiting for a device.
double magnitude(const c10::IValue& v) {
  if (v.isScalar()) {
    const c10::Scalar s = v.toScalar();
    return s.isComplex() ? std::abs(s.toComplexDouble()) : s.toDouble();
  }
  const at::Tensor& t = v.toTensor();
  if (t.dim() > 0 || !t.is_cpu()) return 1;
  return t.is_complex() ? std::abs(t.item<c10::complex<double>>()) : t.item<double>();
}

// With a number that is infinite, NaN or, as a divisor, zero, a summand of zero gives NaN although
// the sum would not: the sum is computed first and one rank of each axis keeps the result.
void with_any_number(const OpCall& call, Plan& plan, bool divides) {
  const auto arguments = partial_and_number(call, plan);
  if (!arguments) return;
  bool keeper = true;
  const int first = call.tensor(0).argument == arguments->partial ? 0 : 1;
  const ShardSpec& in = *plan.inputs[first];
  for (std::size_t a = 0; a < in.placements().size(); ++a) {
    const Placement& p = in.placements()[a];
    if (p.is_partial())
      keeper &= p.is_partial(ReduceOp::Kind::avg) ||
                context_of(in)->group(static_cast<int>(a)).rank() == 0;
  }
  plan.local = [divides, keeper, at = *arguments, in_place = call.in_place(), spec = in,
                to = without_partial(in)](const OperatorHandle& op, Stack a) {
    const double number = magnitude(a[at.number]);
    if (std::isfinite(number) && !(divides && number == 0)) {
      op.callBoxed(a);
      return a;
    }
    const at::Tensor target = a[at.partial].toTensor();
    // In memory of its own if it is written to: the target keeps the memory of its summands.
    a[at.partial] = redistribute_local(target, spec, to);
    op.callBoxed(a);
    if (!keeper) a[0] = at::zeros_like(a[0].toTensor());
    if (in_place) a[0] = target.copy_(a[0].toTensor());
    return a;
  };
}

Plan linear_in_each(const OpCall& call) {
  LabelProblem p = broadcast(call);
  for (std::size_t i = 0; i < call.tensors().size(); ++i)
    if (summands_keep_type(call, call.tensor(i))) p.linear_in.insert(static_cast<int>(i));
  Plan plan = solve(p);
  with_any_number(call, plan, false);
  return plan;
}

// Division by a number is linear; by a tensor, which may contain zeros, it is not: a summand
// divided by zero is not a summand of the quotient.
Plan linear_by_numbers(const OpCall& call) {
  LabelProblem p = broadcast(call);
  if (call.tensors().size() == 1 && call.tensor(0).argument == 0 &&
      summands_keep_type(call, call.tensor(0)))
    p.linear_in = {0};
  Plan plan = solve(p);
  with_any_number(call, plan, true);
  return plan;
}

// A conversion is linear between floating-point types only.
Plan copy(const OpCall& call) {
  LabelProblem p = broadcast(call);
  const auto* out = call.outputs();
  p.linear_together = at::isFloatingType(call.tensor(0).dtype) &&
                      (!out || out->empty() || at::isFloatingType((*out)[0].dtype));
  return solve(p);
}

// The target may have any placement if the value is the same everywhere; zero is zero in every
// summand.
Plan fill(const OpCall& call) {
  if (call.tensor(0).spec.has_partial()) return pointwise(call);
  Plan plan{.outputs = {{call.tensor(0).spec}}};
  if (const TensorInfo* value = call.find("value")) {
    plan.inputs.resize(call.tensors().size());
    plan.inputs[call.index_of(*value)] = replicated(value->spec);
  }
  return plan;
}

Plan zero(const OpCall& call) { return {.outputs = {{call.tensor(0).spec}}}; }

// Element by element, with a mask of what was within the range; scales and zero points are one
// number, or one for each channel.
Plan fake_quantize(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const Labels all = all_labels(n);
  const Shape& shape = call.tensor(0).spec.shape();
  LabelProblem p(call, {all}, {all, all}, {shape, shape});
  const Labels channel =
      call.argument("axis") < 0 ? Labels{} : Labels{normal_dim(call.integer("axis"), n)};
  for (std::size_t i = 1; i < call.tensors().size(); ++i) {
    const bool one = call.tensor(i).spec.dims() == 1 && !channel.empty();
    p.inputs.push_back(one ? channel : unsharded_labels(call.tensor(i)));
  }
  return solve(p);
}

// Lists of tensors, each with its own placements: element j of every list is redistributed like
// element j of the first.
struct ListsOf {
  ListsOf(const OpCall& call, int argument) {
    for (const TensorInfo& t : call.tensors())
      if (t.argument == argument) first.push_back(&t);
  }
  // The element of the first list that belongs to `t`, or null.
  const TensorInfo* of(const TensorInfo& t) const {
    return t.element >= 0 && t.element < static_cast<int>(first.size()) ? first[t.element]
                                                                        : nullptr;
  }
  ShardSpec placed(const TensorInfo& t) const {
    const TensorInfo* its = of(t);
    return its && t.spec.shape() == its->spec.shape() ? without_partial(its->spec)
                                                      : replicated(t.spec);
  }
  std::vector<const TensorInfo*> first;
};

Plan foreach (const OpCall& call) {
  Plan plan;
  const ListsOf lists(call, call.tensor(0).argument);  // the first argument may be a number
  for (const TensorInfo& t : call.tensors()) {
    // The plan is made for results of the shapes of the first list.
    const TensorInfo* its = lists.of(t);
    if (its && t.spec.shape() != its->spec.shape() &&
        (t.spec.numel() != 1 || t.spec.dims() > its->spec.dims()))
      throw ShardingError(call.name(), " of elements of shapes ", list(its->spec.shape()), " and ",
                          list(t.spec.shape()), " has no rule: expand them to one shape first");
    plan.inputs.push_back(lists.placed(t));
  }
  for (const TensorInfo* t : lists.first)
    plan.outputs.push_back({without_partial(t->spec), t->strides});
  return plan;
}

// ----
// Fused steps of optimizers, and the check that gradient scaling makes on gradients: lists of
// tensors, each with its own placements.

// Element j of every list has the spec of parameter j; steps, rates and scales are replicated.
Plan fused(const OpCall& call) {
  const ListsOf lists(call, 0);
  Plan plan;
  for (const TensorInfo& t : call.tensors()) plan.inputs.emplace_back(lists.placed(t));
  return plan;
}

// Each rank checks its shards; whether any value is not finite is known when all ranks have.
Plan non_finite_check_and_unscale(const OpCall& call) {
  Plan plan = fused(call);
  std::vector<int> axes;
  for (int a = 0; a < call.tensor(0).spec.mesh_dims(); ++a)
    if (std::ranges::any_of(plan.inputs,
                            [&](const auto& spec) { return spec->placements()[a].is_shard(); }))
      axes.push_back(a);
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
  set_pointwise_rule(pointwise);
  register_rules(
      {"aten::add.Tensor", "aten::sub.Tensor", "aten::neg", "aten::positive", "aten::rsub.Tensor"},
      linear_together);
  register_rules({"aten::mul.Tensor", "aten::mul.Scalar"}, linear_in_each);
  register_rules({"aten::div.Tensor", "aten::div.Scalar"}, linear_by_numbers);
  register_rules({"aten::clone", "aten::_to_copy", "aten::copy_", "aten::copy", "aten::lift_fresh",
                  "aten::lift_fresh_copy", "aten::contiguous"},
                 copy);
  register_rules({"aten::fill", "aten::fill_"}, fill);
  register_rules({"aten::zero", "aten::zero_"}, zero);
  register_rule("aten::log_sigmoid_forward", log_sigmoid);
  register_rules({"aten::fake_quantize_per_tensor_affine_cachemask",
                  "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
                  "aten::fake_quantize_per_channel_affine_cachemask"},
                 fake_quantize);
  // Some of these have no tag in libtorch 2.11.
  for (const char* op : {"masked_fill", "where", "lerp", "addcmul", "addcdiv", "clamp",
                         "leaky_relu", "_standard_gamma_grad", "_dirichlet_grad", "hardswish",
                         "_prelu_kernel", "complex", "polar", "floor_divide"})
    register_rule(std::string("aten::") + op, pointwise);
  for (const char* op :
       {"threshold", "leaky_relu", "softplus", "elu", "hardtanh", "hardsigmoid", "hardswish",
        "silu", "gelu", "tanh", "sigmoid", "log_sigmoid", "softshrink", "hardshrink", "logit",
        "mish", "native_dropout", "_prelu_kernel"})
    register_rule(concat("aten::", op, "_backward"), pointwise);
  for (const char* op :
       {"add",       "sub",        "mul",   "div",  "addcmul", "addcdiv", "lerp",    "sqrt",
        "neg",       "abs",        "exp",   "log",  "pow",     "maximum", "minimum", "clamp_max",
        "clamp_min", "reciprocal", "rsqrt", "sign", "zero",    "copy",    "sigmoid", "tanh"}) {
    register_rule(std::string("aten::_foreach_") + op, foreach);
    register_rule(std::string("aten::_foreach_") + op + "_", foreach);
  }
  register_rules(
      {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"},
      fused);
  register_rule("aten::_amp_foreach_non_finite_check_and_unscale_", non_finite_check_and_unscale);
});

}  // namespace
}  // namespace tessera::detail::elementwise_rules
