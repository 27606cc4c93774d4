// Variance over uneven parts: every rank's sums are added, then divided by the true count, so that the
// result is what one process computes. Two passes (mean first), as libtorch's own kernels.

#include <ATen/TensorOperators.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <set>
#include <vector>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/over_ranks.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::variance_rules {

namespace {

using Shape = std::vector<std::int64_t>;

Plan variance(const OpCall& call, bool root, bool with_mean) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  std::set<int> dims;
  for (const auto d : call.integers("dim")) dims.insert(static_cast<int>(normal_dim(d, n)));
  if (dims.empty()) {
    for (int d = 0; d < n; ++d) dims.insert(d);
  }
  if (n == 0) dims.clear();
  const bool keep = call.boolean("keepdim");
  Labels out;
  Shape shape;
  for (int d = 0; d < n; ++d) {
    if (dims.contains(d) && !keep) continue;
    out.push_back(dims.contains(d) ? kWhole : d);
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
  plan.local = [=, total = OverRanks{context_of(x.spec), axes, "statistics"},
                dims = Shape(dims.begin(), dims.end())](const c10::OperatorHandle&,
                                                        torch::jit::Stack arguments) {
    const at::Tensor& t = arguments[0].toTensor();
    const at::Tensor mean = total(at::sum(t, dims, true)).div(count);
    const at::Tensor centred = t - mean;
    at::Tensor result = total(at::sum(at::real(centred * centred.conj()), dims, keep))
                            .div(std::max(count - correction, 0.0));
    if (root) result = result.sqrt();
    if (!with_mean) return torch::jit::Stack{result};
    return torch::jit::Stack{result, keep ? mean : mean.squeeze(dims)};
  };
  return plan;
}

const bool registered = [] {
  register_rule("aten::var.correction", [](const OpCall& c) { return variance(c, false, false); });
  register_rule("aten::std.correction", [](const OpCall& c) { return variance(c, true, false); });
  register_rule("aten::var_mean.correction",
                [](const OpCall& c) { return variance(c, false, true); });
  register_rule("aten::std_mean.correction",
                [](const OpCall& c) { return variance(c, true, true); });
  return true;
}();

}  // namespace

}  // namespace tessera::detail::variance_rules
