// Elementwise losses with a reduction: the loss is Partial, and a mean is a sum divided by the
// global count. Losses that depend on all classes of a sample at once are computed on gathered
// inputs.

#include <ATen/core/Reduction.h>

#include <string>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::losses_rules {

namespace {

// A mean: the sum, divided by the global count. In float32 if the inputs are of half precision: the
// sum may exceed its range though the mean does not.
Plan divided(Plan plan, const OpCall& call, double count) {
  plan.arguments = {{call.argument("reduction"), static_cast<std::int64_t>(at::Reduction::Sum)}};
  plan.local = [count](const OperatorHandle& op, Stack arguments) {
    at::ScalarType type = at::ScalarType::Undefined;
    bool narrow = false;
    for (c10::IValue& v : arguments) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      const auto own = v.toTensor().scalar_type();
      type = type == at::ScalarType::Undefined ? own : at::promote_types(type, own);
      if (own != at::kHalf && own != at::kBFloat16) continue;
      narrow = true;
      v = v.toTensor().to(at::kFloat);
    }
    op.callBoxed(arguments);
    const at::Tensor mean = arguments[0].toTensor().div(count);
    arguments[0] = narrow ? mean.to(type) : mean;
    return arguments;
  };
  return plan;
}

// True for weights of the elements or of the positive ones: they are broadcast to the target.
bool is_weight(const OpCall& call, const TensorInfo& t) {
  const std::string& name = call.schema().arguments()[t.argument].name();
  return name == "weight" || name == "pos_weight";
}

Labels broadcast_labels(const OpCall& call, const TensorInfo& t, const Shape& shape) {
  const Shape& s = t.spec.shape();
  Labels labels;
  for (std::size_t d = 0; d < s.size(); ++d) {
    const std::size_t out = shape.size() - s.size() + d;
    if (s.size() > shape.size() || (s[d] != 1 && s[d] != shape[out]))
      throw InvalidArgument(concat(call.name(), ": ", call.schema().arguments()[t.argument].name(),
                                   " of shape ", list(s), " does not broadcast to ", list(shape)));
    labels.push_back(s[d] == shape[out] ? static_cast<int>(out) : kUnsharded);
  }
  return labels;
}

Plan loss(const OpCall& call) {
  LabelProblem p(call);
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  const std::int64_t reduction = call.integer("reduction");
  if (reduction < at::Reduction::None || reduction > at::Reduction::Sum)
    throw InvalidArgument(concat(call.name(), ": reduction ", reduction, " is none of 0 to 2"));
  for (const TensorInfo& t : call.tensors()) {
    if (is_weight(call, t)) {
      p.inputs.push_back(broadcast_labels(call, t, shape));
      continue;
    }
    if (t.spec.shape() != shape)
      throw ShardingError(
          concat(call.name(),
                 " of sharded tensors of different shapes has no rule: expand the target first"));
    p.inputs.push_back(all_labels(n));
  }
  p.outputs = {reduction == at::Reduction::None ? all_labels(n) : Labels{}};
  p.output_shapes = {reduction == at::Reduction::None ? shape : Shape{}};
  p.contract = first_dims(n);
  Plan plan = solve(p);
  return reduction == at::Reduction::Mean
             ? divided(std::move(plan), call, static_cast<double>(call.tensor(0).spec.numel()))
             : plan;
}

Plan loss_backward(const OpCall& call) {
  LabelProblem p(call);
  const TensorInfo& x = *call.find("self");
  const int n = x.spec.dims();
  const std::int64_t reduction = call.integer("reduction");
  for (const TensorInfo& t : call.tensors()) {
    p.inputs.push_back(t.spec.shape() == x.spec.shape() ? all_labels(n) : unsharded_labels(t));
  }
  p.outputs = {all_labels(n)};
  p.output_shapes = {x.spec.shape()};
  Plan plan = solve(p);
  plan.outputs[0].strides = x.strides;
  return reduction == at::Reduction::Mean
             ? divided(std::move(plan), call, static_cast<double>(x.spec.numel()))
             : plan;
}

const AtStart registered([] {
  for (const char* op :
       {"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy",
        "aten::binary_cross_entropy_with_logits", "aten::soft_margin_loss"}) {
    register_rule(op, loss);
    register_rule(std::string(op) + "_backward", loss_backward);
  }
  register_rules({"aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::multi_margin_loss",
                  "aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_forward",
                  "aten::multilabel_margin_loss_backward"},
                 on_gathered);
});

}  // namespace

}  // namespace tessera::detail::losses_rules
