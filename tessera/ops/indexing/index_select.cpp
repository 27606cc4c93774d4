// Selecting along one dim: if it is sharded each rank selects from its shard and gives zeros for
// the rest, so that the result is Partial. Only indices and what is selected move.

#include <ATen/ops/zeros_like.h>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::index_select_rules {

namespace {

Plan index_select(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() == 0) return on_gathered(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  p.inputs = {has_sums(x.dtype) ? all_labels(n) : except(n, d, kUnsharded), {kIndex}};
  p.outputs = {except(n, d, kIndex)};
  Shape shape = x.spec.shape();
  shape[d] = index.spec.shape()[0];
  p.output_shapes = {shape};
  if (has_sums(x.dtype)) p.contract = {d};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), local = plan.outputs[0].spec.local_shape()](
                   const OperatorHandle&, Stack a) {
    const at::Tensor &t = a[0].toTensor(), &given = a[2].toTensor();
    part.check(given, "index_select", false);
    if (part.size == 0) return Stack{nothing_like(t, local)};
    const at::Tensor at = part.global(given);
    return Stack{
        masked(t.index_select(d, (at - part.begin).clamp(0, part.size - 1)), part.mine(at), d)};
  };
  return plan;
}

Plan gather(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() != n) return on_gathered(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  Labels labels = aligned_labels(call, d);
  LabelProblem p(call);
  Labels of_index = labels;
  if (!has_sums(x.dtype)) labels[d] = kUnsharded;
  of_index[d] = kIndex;
  p.inputs = {labels, of_index};
  p.outputs = {of_index};
  p.output_shapes = {index.spec.shape()};
  if (has_sums(x.dtype)) p.contract = {d};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d)](const OperatorHandle&, Stack a) {
    const at::Tensor &t = a[0].toTensor(), &at = a[2].toTensor();
    TORCH_CHECK_INDEX(
        at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
        "gather: an index is out of range");
    if (part.size == 0) return Stack{nothing_like(t, at.sizes())};
    return Stack{masked(t.gather(d, (at - part.begin).clamp(0, part.size - 1)), part.mine(at), 0)};
  };
  return plan;
}

at::Tensor index_select_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes,
                                 std::int64_t dim, const at::Tensor& index) {
  if (sizes.empty()) return at::zeros_like(grad.sum()).index_add(dim, index, grad);
  return zeros_along(grad, dim, sizes).index_add(dim, index, grad);
}

// libtorch's own starts with zeros placed like the gradient, which may be replicated where the
// indices are sharded.
at::Tensor gather_backward(const at::Tensor& grad, const at::Tensor& self, std::int64_t dim,
                           const at::Tensor& index, bool sparse) {
  TORCH_CHECK(
      !sparse,
      "gather: sparse gradients are not supported for sharded tensors: leave out sparse_grad");
  return at::zeros_like(self).scatter_add(dim, index, grad);
}

const AtStart registered([] {
  register_rule("aten::index_select", index_select);
  register_rule("aten::gather", gather);
  register_decomposition("index_select_backward", index_select_backward);
  register_decomposition("gather_backward", gather_backward);
});

}  // namespace

}  // namespace tessera::detail::index_select_rules
