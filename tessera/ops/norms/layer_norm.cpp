// Layer norm: the normalized dims are whole, those before them may be sharded.

#include <algorithm>
#include <vector>

#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::layer_norm_rules {

namespace {

using Shape = std::vector<std::int64_t>;

Plan layer_norm(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims(),
            free = n - static_cast<int>(call.integers("normalized_shape").size());
  LabelProblem p(call);
  label_arguments(p, {{"input", first_dims_free(n, free)}});
  p.outputs.assign(3, first_dims_free(n, free));
  Shape statistics = x.spec.shape();
  std::fill(statistics.begin() + free, statistics.end(), 1);
  if (!call.outputs()) p.output_shapes = {x.spec.shape(), statistics, statistics};
  Plan plan = solve(p);
  if (plan.inputs[0]->local_numel() == 0) {
    // Kernels disagree on the shape of the statistics of nothing.
    plan.local = [a = plan.outputs[0].spec.local_shape(), b = plan.outputs[1].spec.local_shape()](
                     const c10::OperatorHandle&, torch::jit::Stack arguments) {
      const at::Tensor& t = arguments[0].toTensor();
      return torch::jit::Stack{t.new_empty(a), t.new_empty(b), t.new_empty(b)};
    };
  }
  return plan;
}

Plan layer_norm_backward(const OpCall& call) {
  const TensorInfo& x = *call.find("input");
  const int n = x.spec.dims(),
            free = n - static_cast<int>(call.integers("normalized_shape").size());
  const Labels rows = first_dims_free(n, free);
  LabelProblem p(call);
  label_arguments(p, {{"grad_out", rows}, {"input", rows}, {"mean", rows}, {"rstd", rows}});
  const Shape shape = call.integers("normalized_shape");
  p.outputs = {rows, Labels(n - free, kWhole), Labels(n - free, kWhole)};
  p.output_shapes = {x.spec.shape(), shape, shape};
  p.contract = first_dims(free);
  Plan plan = solve(p);
  plan.outputs[0].strides = contiguous_strides(x.spec.shape());
  if (plan.inputs[call.index_of(x)]->local_numel() == 0) {
    plan.local = [rows_shape = plan.outputs[0].spec.local_shape(), shape](
                     const c10::OperatorHandle&, torch::jit::Stack arguments) {
      const at::Tensor& t = arguments[1].toTensor();
      return torch::jit::Stack{t.new_empty(rows_shape), t.new_zeros(shape), t.new_zeros(shape)};
    };
  }
  return plan;
}

const bool registered = [] {
  register_rule("aten::native_layer_norm", layer_norm);
  register_rule("aten::native_layer_norm_backward", layer_norm_backward);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::layer_norm_rules
