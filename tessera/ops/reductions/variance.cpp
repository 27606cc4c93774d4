// Variance over uneven shards: every rank's sums are added, then divided by the global count, so
// that the result is what one process computes.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/real.h>
#include <ATen/ops/std_mean.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "tessera/ops/reductions/detail/reduced.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::variance_rules {
namespace {

Plan variance(const OpCall& call, bool root, bool with_mean) {
  const TensorInfo& x = call.tensor(0);
  if (!at::isFloatingType(x.dtype) && !at::isComplexType(x.dtype))
    throw InvalidArgument(call.name(), " of ", c10::toString(x.dtype),
                          " values: give floating-point or complex ones");
  const std::set<int> dims = reduced_dims(call);
  const bool keep = keeps(call);
  const double correction = call.has("correction") ? call.number("correction") : 1.0;
  double count = 1;
  for (const int d : dims) count *= static_cast<double>(x.spec.shape()[d]);
  Plan plan = solve(over_dims(call, dims, with_mean ? 2 : 1));
  const std::vector<int> axes = reduce_inside(plan.outputs[0]);
  if (axes.empty()) return plan;
  if (with_mean) reduce_inside(plan.outputs[1]);
  // Each rank's count, mean and sum of squares around it are combined (Chan, Golub and LeVeque:
  // "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
  const at::ScalarType type = x.dtype;
  double here = 1;
  for (const int d : dims) here *= static_cast<double>(plan.inputs[0]->local_shape()[d]);
  Shape kept = plan.inputs[0]->local_shape();
  for (const int d : dims) kept[d] = 1;
  plan.local = [=, total = OverRanks{context_of(x.spec), axes, "statistics"},
                dims = Shape(dims.begin(), dims.end())](const OperatorHandle&, Stack arguments) {
    const at::Tensor t = arguments[0].toTensor();
    const bool complex = at::isComplexType(type);
    const auto wide = complex ? at::kComplexDouble : at::kDouble;
    at::Tensor part_mean, part_squares;
    if (here == 0) {
      part_mean = at::zeros(kept, t.options().dtype(wide));
      part_squares = at::zeros(kept, t.options().dtype(at::kDouble));
    } else {
      const at::Tensor given = type == at::kHalf || type == at::kBFloat16 ? t.to(at::kFloat) : t;
      // Squares of a root's float32 summands may be beyond float32.
      const at::OptionalIntArrayRef over(dims);
      const auto [v, m] = root ? at::std_mean(given, over, at::Scalar(0), true)
                               : at::var_mean(given, over, at::Scalar(0), true);
      part_mean = m.to(wide);
      part_squares = (root ? v.to(at::kDouble).square() : v.to(at::kDouble)) * here;
    }
    const at::Tensor mean = total(part_mean * (here / count));
    const at::Tensor off = part_mean - mean;
    at::Tensor result = total(part_squares + at::real(off * off.conj()) * here)
                            .div(std::max(0.0, count - correction));
    if (root) result = result.sqrt();
    result = (keep ? result : result.squeeze(dims)).to(c10::toRealValueType(type));
    if (!with_mean) return Stack{result};
    return Stack{result, (keep ? mean : mean.squeeze(dims)).to(type)};
  };
  return plan;
}

// ----
// Vector norms of any order: the p-norm of the ranks' p-norms.

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
    throw InvalidArgument("aten::renorm: the tensor has ", n, " dims, and needs at least 2");
  const int d = normal_dim(call.integer("dim"), n);
  Labels labels(n, kUnsharded);
  labels[d] = d;
  LabelProblem p(call, {labels}, {labels});
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
  return mapped(tensors, [&](const at::Tensor& t) {
    return at::linalg_vector_norm(t, order, std::nullopt, false, dtype);
  });
}

const AtStart registered([] {
  register_rule("aten::var.correction", [](const OpCall& c) { return variance(c, false, false); });
  register_rule("aten::std.correction", [](const OpCall& c) { return variance(c, true, false); });
  register_rule("aten::var_mean.correction",
                [](const OpCall& c) { return variance(c, false, true); });
  register_rule("aten::std_mean.correction",
                [](const OpCall& c) { return variance(c, true, true); });
  register_rules({"aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim"},
                 norm);
  register_rule("aten::renorm", renorm);
  register_decomposition("dist", dist);
  register_decomposition("_foreach_norm.Scalar", foreach_norm);
});

}  // namespace
}  // namespace tessera::detail::variance_rules
