// Vector norms of any order: the p-norm of the ranks' p-norms.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/norm.h>

#include <cmath>
#include <limits>

#include "tessera/ops/reductions/detail/reduced.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::vector_norm_rules {

namespace {

// Norms of shards are raised to the order, added and rooted in a dtype wide enough for it: squares
// of half-precision norms soon exceed its range.
at::ScalarType wide_type(at::ScalarType t) {
  return t == at::kHalf || t == at::kBFloat16 ? at::kFloat : at::kDouble;
}

// The p-norm of the ranks' p-norms.
Plan norm(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  const char* name = call.argument("ord") >= 0 ? "ord" : "p";
  const double order = call.has(name) ? call.number(name) : 2.0;
  const auto* out = call.outputs();
  const at::ScalarType type =
      out && !out->empty() ? (*out)[0].dtype : c10::toRealValueType(call.tensor(0).dtype);
  Plan plan = solve(p);
  const bool empty = plan.inputs[0]->local_numel() == 0;
  // Counts add up: the result is Partial.
  const std::vector<int> axes = order == 0 ? std::vector<int>() : reduce_inside(plan.outputs[0]);
  if (axes.empty() && !(order == 0 && empty)) return plan;
  plan.local = [order, empty, type, over = OverRanks{context_of(call.tensor(0).spec), axes, "norm"},
                shape = plan.outputs[0].spec.local_shape()](const OperatorHandle& op, Stack a) {
    const at::Tensor x = a[0].toTensor();
    const bool infinite = std::isinf(order);
    const at::ScalarType wide = wide_type(type);
    at::Tensor part;
    // Kernels refuse some orders for empty tensors; a negative one gives infinity, so that nothing
    // is added.
    if (empty) {
      part = at::full(shape, order >= 0 ? 0.0 : std::numeric_limits<double>::infinity(),
                      x.options().dtype(order == 0 ? type : wide));
    } else {
      if (wide == at::kFloat) a[0] = x.to(x.is_complex() ? at::kComplexFloat : at::kFloat);
      // the dtype of the result may be an argument, to which a half-precision value would be
      // rounded
      if (wide == at::kFloat && a.size() > 4 && a[4].isInt()) a[4] = at::kFloat;
      op.callBoxed(a);
      part = order == 0 ? a[0].toTensor() : a[0].toTensor().to(wide);
    }
    if (order == 0) return Stack{part.to(type)};
    if (infinite) return Stack{over(part, order > 0 ? ReduceOp::max : ReduceOp::min).to(type)};
    return Stack{over(part.pow(order)).pow(1.0 / order).to(type)};
  };
  return plan;
}

// Each slice along `dim` has a norm over all other dims, which are not sharded.
Plan renorm(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  if (n < 2)
    throw InvalidArgument(
        concat("aten::renorm: the tensor has ", n, " dims, and needs at least 2"));
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  p.inputs = {Labels(n, kUnsharded)};
  p.inputs[0][d] = d;
  p.outputs = p.inputs;
  if (!call.outputs()) p.output_shapes = {call.tensor(0).spec.shape()};
  return solve(p);
}

at::Tensor dist(const at::Tensor& self, const at::Tensor& other, const at::Scalar& p) {
  return at::norm(self - other, p);
}

// The tensors of a list may have any placements: each has a norm of its own (clip_grad_norm_).
std::vector<at::Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order,
                                     std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!order.isBoolean() && !order.isComplex(), "_foreach_norm: the order is ",
              order.type(), ", and must be an integer or a float");
  std::vector<at::Tensor> norms;
  for (const at::Tensor& t : tensors)
    norms.push_back(at::linalg_vector_norm(t, order, std::nullopt, false, dtype));
  return norms;
}

const AtStart registered([] {
  register_rules({"aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim"},
                 norm);
  register_rule("aten::renorm", renorm);
  register_decomposition("dist", dist);
  register_decomposition("_foreach_norm.Scalar", foreach_norm);
});

}  // namespace

}  // namespace tessera::detail::vector_norm_rules
