// Elementwise losses with a reduction: the loss is Partial, and a mean is a sum divided by the
// global count. Losses that depend on all classes of a sample at once are computed on gathered
// inputs.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss_native.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <string>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::losses_rules {
namespace {

// If the call asks for a mean: the sum, divided by the global count of x. In float32 if the inputs
// are of half precision: the sum may exceed its range though the mean does not.
Plan divided(Plan plan, const OpCall& call, const TensorInfo& x) {
  if (call.integer("reduction") != at::Reduction::Mean) return plan;
  plan.arguments = {{call.argument("reduction"), static_cast<std::int64_t>(at::Reduction::Sum)}};
  plan.local = [count = static_cast<double>(x.spec.numel())](const OperatorHandle& op,
                                                             Stack arguments) {
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

Plan loss(const OpCall& call) {
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  const std::int64_t reduction = call.integer("reduction");
  if (reduction < at::Reduction::None || reduction > at::Reduction::Sum)
    throw InvalidArgument(call.name(), ": reduction ", reduction, " is none of 0 to 2");
  const bool each = reduction == at::Reduction::None;
  LabelProblem p(call, {}, {each ? all_labels(n) : Labels{}}, {each ? shape : Shape{}});
  for (const TensorInfo& t : call.tensors()) {
    // Weights of the elements or of the positive ones are broadcast to the target.
    if (&t == call.find("weight") || &t == call.find("pos_weight")) {
      p.inputs.push_back(broadcast_labels(call, t, shape));
      continue;
    }
    if (t.spec.shape() != shape)
      throw ShardingError(
          call.name(),
          " of sharded tensors of different shapes has no rule: expand the target first");
    p.inputs.push_back(all_labels(n));
  }
  p.contract = first_dims(n);
  return divided(solve(p), call, call.tensor(0));
}

Plan loss_backward(const OpCall& call) {
  const TensorInfo& x = *call.find("self");
  const int n = x.spec.dims();
  LabelProblem p(call, {}, {all_labels(n)}, {x.spec.shape()});
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(t.spec.shape() == x.spec.shape() ? all_labels(n) : unsharded_labels(t));
  Plan plan = solve(p);
  plan.outputs[0].strides = x.strides;
  return divided(std::move(plan), call, x);
}

// ----
// Softmax along a dim that may be sharded: the largest value and the sum of exponentials of each
// row are reduced over the ranks; no rank ever holds all classes.

// The plan of a softmax or its gradient; `local`, made of OverRanks and the dim, computes it where
// the ranks share rows.
template <class Local>
Plan along_dim(const OpCall& call, const TensorInfo& x, const Local& local) {
  const int n = x.spec.dims(), dim = normal_dim(call.integer("dim"), n);
  Plan plan = solve({call, std::vector(call.tensors().size(), all_labels(n)), {all_labels(n)}});
  if (const auto axes = axes_that_shard(*plan.inputs[0], dim); !axes.empty())
    plan.local = local(OverRanks{context_of(x.spec), axes, "softmax"}, dim);
  return plan;
}

Plan softmax(const OpCall& call, bool logarithm) {
  const TensorInfo& x = call.tensor(0);
  if (!at::isFloatingType(x.dtype))
    throw InvalidArgument(call.name(), " of ", c10::toString(x.dtype),
                          " values: give floating-point ones");
  if (call.argument("half_to_float") >= 0 && call.boolean("half_to_float") && x.dtype != at::kHalf)
    throw InvalidArgument(call.name(), " with half_to_float of ", c10::toString(x.dtype),
                          " values: it is for Half");
  return along_dim(call, x, [logarithm](const OverRanks& over, int dim) {
    return [=](const OperatorHandle&, Stack a) {
      const at::Tensor& given = a[0].toTensor();
      const bool to_float = a[2].toBool();
      const at::Tensor t = given.to(at::toOpMathType(given.scalar_type()));
      Shape rows = t.sizes().vec();
      rows[dim] = 1;
      const at::Tensor top = over(
          t.size(dim) > 0 ? t.amax({dim}, true)
                          : at::full(rows, -std::numeric_limits<double>::infinity(), t.options()),
          ReduceOp::max);
      const at::Tensor shifted = t - top, e = shifted.exp(),
                       sum = over(e.sum({dim}, true), ReduceOp::sum);
      const at::Tensor y = logarithm ? shifted - sum.log() : e / sum;
      return Stack{y.to(to_float ? at::kFloat : given.scalar_type())};
    };
  });
}

Plan softmax_backward(const OpCall& call, bool logarithm) {
  return along_dim(call, *call.find("output"), [logarithm](const OverRanks& over, int dim) {
    return [=](const OperatorHandle&, Stack a) {
      const auto wide = at::toOpMathType(a[1].toTensor().scalar_type());
      const at::Tensor g = a[0].toTensor().to(wide), out = a[1].toTensor().to(wide);
      const at::Tensor sum = over((logarithm ? g : g * out).sum({dim}, true), ReduceOp::sum);
      const at::Tensor dx = logarithm ? g - out.exp() * sum : out * (g - sum);
      return Stack{dx.to(a[3].toScalarType())};
    };
  });
}

// ----
// Negative log-likelihood and cross-entropy with sharded classes: each rank contributes the scores
// of the targets that are among its classes.

// Negative log-likelihood: classes are dim 1 of the scores, dim 0 where there are no samples.

struct Classes {
  LabelProblem problem;
  int dim;
  Labels scores, targets;
  Shape target_shape;
  std::int64_t reduction;

  explicit Classes(const OpCall& call) : problem(call), reduction(call.integer("reduction")) {
    const TensorInfo& x = *call.find("self");
    const int n = x.spec.dims();
    dim = n > 1 ? 1 : 0;
    scores = all_labels(n);
    for (int d = 0; d < n; ++d) {
      if (d == dim) continue;
      targets.push_back(d);
      target_shape.push_back(x.spec.shape()[d]);
    }
    if (const TensorInfo* w = call.find("weight"); w && w->dtype != x.dtype)
      throw InvalidArgument(call.name(), ": weight is ", c10::toString(w->dtype),
                            ", the scores are ", c10::toString(x.dtype), "; convert it");
    if (const TensorInfo* t = call.find("target"); t->dtype != at::kLong && t->dtype != at::kByte)
      throw InvalidArgument(call.name(), ": target is ", c10::toString(t->dtype),
                            ", and must be Long or Byte; convert it");
    const bool each = reduction == at::Reduction::None;
    for (const TensorInfo& t : call.tensors()) {
      Labels labels(t.spec.dims(), kUnsharded);
      if (&t == &x) labels = scores;
      if (&t == call.find("target") && t.spec.dims() == static_cast<int>(targets.size()))
        labels = targets;
      if (&t == call.find("weight")) labels = {dim};
      if (&t == call.find("grad_output") && each) labels = targets;
      problem.inputs.push_back(labels);
    }
  }
};

// The range of this rank's classes, and which scores are picked from them.
struct Picked {
  std::int64_t begin, size, all, ignored;
  at::Tensor here;   // targets that are among this rank's classes
  at::Tensor index;  // their index there, 0 elsewhere
  Picked(const at::Tensor& target, std::int64_t b, std::int64_t s, std::int64_t total,
         std::int64_t ignore)
      : begin(b), size(s), all(total), ignored(ignore) {
    const at::Tensor counted = target.ne(ignored);
    const at::Tensor wrong = counted.logical_and(target.lt(0).logical_or(target.ge(all)));
    if (!target.is_cpu()) {
      require_index(wrong.any().logical_not(), "a target is out of bounds of the classes");
    } else if (wrong.any().item<bool>()) {
      TORCH_CHECK_INDEX(false, "Target ", target.masked_select(wrong)[0].item<std::int64_t>(),
                        " is out of bounds of ", all, " classes.");
    }
    here = counted.logical_and(target.ge(begin)).logical_and(target.lt(begin + size));
    index = at::where(here, target - begin, at::zeros_like(target));
  }
  at::Tensor weights(const c10::IValue& weight, const at::Tensor& scores) const {
    at::Tensor zero = at::zeros(index.sizes(), scores.options());
    if (size == 0) return zero;
    if (!weight.isTensor() || !weight.toTensor().defined()) return at::where(here, zero + 1, zero);
    return at::where(
        here, weight.toTensor().index_select(0, index.reshape({-1})).view(index.sizes()), zero);
  }
};

Plan nll(const OpCall& call) {
  Classes c(call);
  const TensorInfo& x = call.tensor(0);
  const bool each = c.reduction == at::Reduction::None && x.spec.dims() > 1,
             mean = c.reduction == at::Reduction::Mean;
  c.problem.outputs = {each ? c.targets : Labels{}, {}};
  c.problem.output_shapes = {each ? c.target_shape : Shape{}, {}};
  for (int d = 0; d < x.spec.dims(); ++d) c.problem.contract.insert(d);
  Plan plan = solve(c.problem);
  const auto class_axes = axes_that_shard(*plan.inputs[0], c.dim);
  const auto axes = mean ? reduce_inside(plan.outputs[1]) : std::vector<int>();
  if (class_axes.empty() && axes.empty()) return plan;
  const OverRanks over{context_of(x.spec), axes, "weights of targets"};
  if (class_axes.empty()) {
    plan.arguments = {{call.argument("reduction"), static_cast<std::int64_t>(at::Reduction::Sum)}};
    plan.local = [over](const OperatorHandle& op, Stack a) {
      const auto type = a[0].toTensor().scalar_type(), wide = at::toOpMathType(type);
      if (wide != type) {
        a[0] = a[0].toTensor().to(wide);
        if (a[2].isTensor() && a[2].toTensor().defined()) a[2] = a[2].toTensor().to(wide);
      }
      op.callBoxed(a);
      const at::Tensor weight = over(a[1].toTensor().clone(), ReduceOp::sum);
      return Stack{a[0].toTensor().div(weight).to(type), weight.to(type)};
    };
    return plan;
  }
  plan.local = [over, dim = c.dim, reduction = c.reduction,
                begin = plan.inputs[0]->local_offset()[c.dim],
                all = x.spec.shape()[c.dim]](const OperatorHandle&, Stack a) {
    const at::Tensor& scores = a[0].toTensor();
    const Picked picked(a[1].toTensor(), begin, scores.size(dim), all, a[4].toInt());
    const at::Tensor weight = picked.weights(a[2], scores);
    const at::Tensor zero = at::zeros_like(weight);
    const at::Tensor each =
        picked.size == 0
            ? zero
            : at::where(picked.here,
                        -weight * scores.gather(dim, picked.index.unsqueeze(dim)).squeeze(dim),
                        zero);
    if (reduction == at::Reduction::None) return Stack{each, at::zeros({}, scores.options())};
    // Summed in float32 if the scores are of half precision: the mean may be within its range
    // though the sum is not.
    const auto type = scores.scalar_type(), wide = at::toOpMathType(type);
    const at::Tensor total = over(weight.sum(wide), ReduceOp::sum), sum = each.sum(wide);
    return Stack{(reduction == at::Reduction::Mean ? sum.div(total) : sum).to(type),
                 total.to(type)};
  };
  return plan;
}

Plan nll_backward(const OpCall& call) {
  Classes c(call);
  const TensorInfo& x = *call.find("self");
  c.problem.outputs = {c.scores};
  c.problem.output_shapes = {x.spec.shape()};
  Plan plan = solve(c.problem);
  const ShardSpec& lies = *plan.inputs[call.index_of(x)];
  if (axes_that_shard(lies, c.dim).empty()) return plan;
  plan.local = [dim = c.dim, reduction = c.reduction, begin = lies.local_offset()[c.dim],
                all = x.spec.shape()[c.dim]](const OperatorHandle&, Stack a) {
    const at::Tensor &g = a[0].toTensor(), &scores = a[1].toTensor();
    const Picked picked(a[2].toTensor(), begin, scores.size(dim), all, a[5].toInt());
    at::Tensor dx = at::zeros_like(scores, at::MemoryFormat::Contiguous);
    if (picked.size == 0) return Stack{dx};
    at::Tensor each = -picked.weights(a[3], scores) * g;
    if (reduction == at::Reduction::Mean)
      each = at::where(picked.here, each / a[6].toTensor(), at::zeros_like(each));
    dx.scatter_(dim, picked.index.unsqueeze(dim), each.unsqueeze(dim));
    return Stack{dx};
  };
  return plan;
}

// Label smoothing: libtorch selects the targets that count, whose number depends on the data; here
// they are weighted.

at::Tensor cross_entropy_loss(const at::Tensor& self, const at::Tensor& target,
                              const std::optional<at::Tensor>& weight, std::int64_t reduction,
                              c10::SymInt ignore_index, double label_smoothing) {
  const std::int64_t dims = self.dim(), dim = dims > 1 ? 1 : 0;
  const bool classes = self.sizes() != target.sizes() && !at::isFloatingType(target.scalar_type());
  TORCH_CHECK(reduction >= at::Reduction::None && reduction <= at::Reduction::Sum,
              "cross_entropy: reduction ", reduction, " is none of 0 to 2");
  if (!(label_smoothing > 0 && label_smoothing <= 1) || !classes ||
      (dims != 1 && dims != 2 && dims != 4))
    return at::native::cross_entropy_loss_symint(self, target, weight, reduction, ignore_index,
                                                 label_smoothing);
  const at::Tensor scores = at::log_softmax(self, dim, self.scalar_type());
  const auto [hard, total] =
      dims == 4 ? at::nll_loss2d_forward_symint(scores, target, weight, reduction, ignore_index)
                : at::nll_loss_forward_symint(scores, target, weight, reduction, ignore_index);
  const bool weighted = weight.has_value() && weight->defined();
  const at::Tensor all = -(weighted ? scores * as_dim(*weight, dim, dims) : scores).sum(dim);
  const at::Tensor counted = target.ne(ignore_index.expect_int());
  at::Tensor smooth = at::where(counted, all, at::zeros_like(all));
  if (reduction != at::Reduction::None) smooth = smooth.sum();
  // The weights of the targets that count have been summed already.
  if (reduction == at::Reduction::Mean) smooth = smooth / total.detach();
  return hard * (1 - label_smoothing) +
         smooth * (label_smoothing / static_cast<double>(self.size(dim)));
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
  register_rule("aten::_softmax", [](const OpCall& c) { return softmax(c, false); });
  register_rule("aten::_log_softmax", [](const OpCall& c) { return softmax(c, true); });
  register_rule("aten::_softmax_backward_data",
                [](const OpCall& c) { return softmax_backward(c, false); });
  register_rule("aten::_log_softmax_backward_data",
                [](const OpCall& c) { return softmax_backward(c, true); });
  register_rules({"aten::nll_loss_forward", "aten::nll_loss2d_forward"}, nll);
  register_rules({"aten::nll_loss_backward", "aten::nll_loss2d_backward"}, nll_backward);
  register_decomposition("cross_entropy_loss", cross_entropy_loss);
});

}  // namespace
}  // namespace tessera::detail::losses_rules
