// Variance over uneven shards: every rank's sums are added, then divided by the global count, so
// that the result is what one process computes.

#include <ATen/TensorOperators.h>
#include <ATen/ops/real.h>
#include <ATen/ops/std_mean.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::variance_rules {

namespace {

Plan variance(const OpCall& call, bool root, bool with_mean) {
  const TensorInfo& x = call.tensor(0);
  if (!at::isFloatingType(x.dtype) && !at::isComplexType(x.dtype))
    throw InvalidArgument(concat(call.name(), " of ", c10::toString(x.dtype),
                                 " values: give floating-point or complex ones"));
  const int n = x.spec.dims();
  std::set<int> dims;
  for (const auto d : call.integers("dim")) {
    if (!dims.insert(static_cast<int>(normal_dim(d, n))).second)
      throw InvalidArgument(concat(call.name(), ": dim ", d, " is given twice"));
  }
  if (dims.empty()) {
    for (int d = 0; d < n; ++d) dims.insert(d);
  }
  if (n == 0) dims.clear();
  const bool keep = call.boolean("keepdim");
  Labels out;
  Shape shape;
  for (int d = 0; d < n; ++d) {
    if (dims.contains(d) && !keep) continue;
    out.push_back(dims.contains(d) ? kUnsharded : d);
    shape.push_back(dims.contains(d) ? 1 : x.spec.shape()[d]);
  }
  LabelProblem p(call);
  p.inputs = {all_labels(n)};
  p.outputs.assign(with_mean ? 2 : 1, out);
  p.output_shapes.assign(p.outputs.size(), shape);
  p.contract = dims;
  const double correction = call.has("correction") ? call.number("correction") : 1.0;
  double count = 1;
  for (const int d : dims) count *= static_cast<double>(x.spec.shape()[d]);
  Plan plan = solve(p);
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

const AtStart registered([] {
  register_rule("aten::var.correction", [](const OpCall& c) { return variance(c, false, false); });
  register_rule("aten::std.correction", [](const OpCall& c) { return variance(c, true, false); });
  register_rule("aten::var_mean.correction",
                [](const OpCall& c) { return variance(c, false, true); });
  register_rule("aten::std_mean.correction",
                [](const OpCall& c) { return variance(c, true, true); });
});

}  // namespace

}  // namespace tessera::detail::variance_rules
