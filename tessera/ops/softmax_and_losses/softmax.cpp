// Softmax along a dim that may be sharded: the largest value and the sum of exponentials of each
// row are reduced over the ranks; no rank ever holds all classes.

#include <ATen/OpMathType.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>

#include <limits>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::softmax_rules {

namespace {

// The plan of a softmax or its gradient; `local`, made of OverRanks and the dim, computes it where
// the ranks share rows.
template <class Local>
Plan along_dim(const OpCall& call, const TensorInfo& x, const Local& local) {
  const int n = x.spec.dims(), dim = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  p.inputs.assign(call.tensors().size(), all_labels(n));
  p.outputs = {all_labels(n)};
  Plan plan = solve(p);
  if (const auto axes = axes_that_shard(*plan.inputs[0], dim); !axes.empty())
    plan.local = local(OverRanks{context_of(x.spec), axes, "softmax"}, dim);
  return plan;
}

Plan softmax(const OpCall& call, bool logarithm) {
  const TensorInfo& x = call.tensor(0);
  if (!at::isFloatingType(x.dtype))
    throw InvalidArgument(
        concat(call.name(), " of ", c10::toString(x.dtype), " values: give floating-point ones"));
  if (call.argument("half_to_float") >= 0 && call.boolean("half_to_float") && x.dtype != at::kHalf)
    throw InvalidArgument(concat(call.name(), " with half_to_float of ", c10::toString(x.dtype),
                                 " values: it is for Half"));
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

const AtStart registered([] {
  register_rule("aten::_softmax", [](const OpCall& c) { return softmax(c, false); });
  register_rule("aten::_log_softmax", [](const OpCall& c) { return softmax(c, true); });
  register_rule("aten::_softmax_backward_data",
                [](const OpCall& c) { return softmax_backward(c, false); });
  register_rule("aten::_log_softmax_backward_data",
                [](const OpCall& c) { return softmax_backward(c, true); });
});

}  // namespace

}  // namespace tessera::detail::softmax_rules
