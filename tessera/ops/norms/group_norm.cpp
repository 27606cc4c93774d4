// Group norm: samples may be sharded; channels and what is inside of a group are whole.

#include <vector>

#include "tessera/ops/rules/empty_parts.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::group_norm_rules {

namespace {

using Shape = std::vector<std::int64_t>;

// Samples are free; channels, groups and what is inside are whole. The counts among the arguments
// are the local ones.
Plan group_norm(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  LabelProblem p(call);
  label_arguments(p, {{"input", first_dims_free(n, 1)}});
  p.outputs = {first_dims_free(n, 1), first_dims_free(2, 1), first_dims_free(2, 1)};
  const Shape statistics{x.spec.shape()[0], call.integer("group")};
  p.output_shapes = {x.spec.shape(), statistics, statistics};
  Plan plan = solve(p);
  plan.arguments = {{call.argument("N"), plan.inputs[0]->local_shape()[0]}};
  return plan;
}

Plan group_norm_backward(const OpCall& call) {
  const TensorInfo& x = *call.find("input");
  const int n = x.spec.dims();
  LabelProblem p(call);
  label_arguments(p, {{"grad_out", first_dims_free(n, 1)},
                      {"input", first_dims_free(n, 1)},
                      {"mean", first_dims_free(2, 1)},
                      {"rstd", first_dims_free(2, 1)}});
  const Shape channels{call.integer("C")};
  p.outputs = {first_dims_free(n, 1), {kWhole}, {kWhole}};
  p.output_shapes = {x.spec.shape(), channels, channels};
  p.contract = {0};
  Plan plan = solve(p);
  plan.arguments = {{call.argument("N"), plan.inputs[0]->local_shape()[0]}};
  return plan;
}

const bool registered = [] {
  register_rule("aten::native_group_norm", guarded(group_norm));
  register_rule("aten::native_group_norm_backward", guarded(group_norm_backward));
  return true;
}();

}  // namespace

}  // namespace tessera::detail::group_norm_rules
