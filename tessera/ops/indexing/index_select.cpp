// Selecting along one dim: if it is sharded each rank selects from its shard and gives zeros for
// the rest, so that the result is Partial. Only indices and what is selected move.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/one_hot_native.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::index_select_rules {
namespace {

Plan index_select(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() == 0) return on_gathered(call);
  const int d = normal_dim(call.integer("dim"), n);
  Shape shape = x.spec.shape();
  shape[d] = index.spec.shape()[0];
  const Labels of_x = has_sums(x.dtype) ? all_labels(n) : except(n, d, kUnsharded);
  LabelProblem p(call, {of_x, {kIndex}}, {except(n, d, kIndex)}, {shape});
  if (has_sums(x.dtype)) p.contract = {d};
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), local = plan.outputs[0].spec.local_shape()](
                   const OperatorHandle&, Stack a) {
    const at::Tensor& at = a[2].toTensor();
    part.check(at, "index_select", false);
    return Stack{slices_here(a[0].toTensor(), d, at, part, local)};
  };
  return plan;
}

Plan gather(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() != n) return on_gathered(call);
  const int d = normal_dim(call.integer("dim"), n);
  Labels labels = aligned_labels(call, d), of_index = labels;
  if (!has_sums(x.dtype)) labels[d] = kUnsharded;
  of_index[d] = kIndex;
  LabelProblem p(call, {labels, of_index}, {of_index}, {index.spec.shape()});
  if (has_sums(x.dtype)) p.contract = {d};
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d)](const OperatorHandle&, Stack a) {
    const at::Tensor &t = a[0].toTensor(), &at = a[2].toTensor();
    require_range(at, part.extent, "gather");
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

// ----
// Values looked up in a tensor that is replicated, and selections whose number depends on the data,
// which are gathered.

Plan looked_up(const OpCall& call) {
  const auto* outputs = call.outputs();
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  LabelProblem p(call, {}, {all_labels(n)});
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(&t == &call.tensor(0) ? all_labels(n) : unsharded_labels(t));
  if (!outputs) p.output_shapes = {shape};
  return solve(p);
}

// Each value is looked up in the sequence, or in that of its row: which must be complete. Of a
// sorter all ranks see all, since libtorch checks its numbers.
Plan searchsorted(const OpCall& call) {
  if (call.find("sorter")) return on_gathered(call);
  const TensorInfo& values = *call.find("self");
  const int n = values.spec.dims();
  LabelProblem p(call, {}, {all_labels(n)});
  label_arguments(p, {{"sorted_sequence", last_dims_unsharded(n, 1)}, {"self", all_labels(n)}});
  if (!call.outputs()) p.output_shapes = {values.spec.shape()};
  return solve(p);
}

// The class of each element by comparison, which each rank makes of its own.
at::Tensor one_hot(const at::Tensor& self, std::int64_t classes) {
  const ShardMeta* meta = meta_of(self);
  if (!meta || !meta->spec().has_shard() || self.scalar_type() != at::kLong || self.numel() == 0)
    return at::native::one_hot(self, classes);
  TORCH_CHECK(self.min().item<std::int64_t>() >= 0, "Class values must be non-negative.");
  const std::int64_t largest = self.max().item<std::int64_t>();
  TORCH_CHECK(classes == -1 || classes > 0, "num_classes should be positive");
  TORCH_CHECK(classes == -1 || classes > largest, "Class values must be smaller than num_classes.");
  const std::int64_t all = classes == -1 ? largest + 1 : classes;
  const at::Tensor numbers = at::arange(all, meta->local.options());
  return self.detach().unsqueeze(-1).eq(promote(numbers, context_of(meta->spec()))).to(at::kLong);
}

// The index of each repeated element, from how often each is repeated. libtorch's meta kernel
// cannot say how many there are.
at::Tensor repeat_interleave(const at::Tensor& repeats, std::optional<c10::SymInt> size) {
  return promote(at::repeat_interleave_symint(full_tensor(repeats.detach()), std::move(size)),
                 context_of(meta_or_throw(repeats).spec()));
}

const AtStart registered([] {
  register_rule("aten::index_select", index_select);
  register_rule("aten::gather", gather);
  register_decomposition("index_select_backward", index_select_backward);
  register_decomposition("gather_backward", gather_backward);
  register_rules({"aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar", "aten::bucketize.Tensor"},
                 looked_up);
  register_rules({"aten::isin.Scalar_Tensor", "aten::bucketize.Scalar", "aten::searchsorted",
                  "aten::masked_select", "aten::take", "aten::nonzero", "aten::nonzero_static"},
                 on_gathered);
  register_rule("aten::searchsorted.Tensor", searchsorted);
  register_decomposition("repeat_interleave.Tensor", repeat_interleave);
  register_decomposition("one_hot", one_hot);
});

}  // namespace
}  // namespace tessera::detail::index_select_rules
