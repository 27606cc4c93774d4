// Embeddings: rows of a table, looked up by index. Where the rows are sharded each rank looks up those
// that it has, and the result is Partial.

#include <vector>

#include "tessera/ops/indexing/part.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::embedding_rules {

namespace {

using Shape = std::vector<std::int64_t>;

Plan embedding(const OpCall& call) {
  const TensorInfo &weight = *call.find("weight"), &indices = *call.find("indices");
  const int n = indices.spec.dims();
  LabelProblem p(call);
  p.inputs = {{kIndex, n}, all_labels(n)};
  p.outputs = {all_labels(n + 1)};
  Shape shape = indices.spec.shape();
  shape.push_back(weight.spec.shape()[1]);
  p.output_shapes = {shape};
  p.contract = {kIndex};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(0)) return plan;
  plan.local = [part = part_of(*plan.inputs[0], 0), local = plan.outputs[0].spec.local_shape()](
                   const c10::OperatorHandle&, torch::jit::Stack a) {
    const at::Tensor &t = a[0].toTensor(), &at = a[1].toTensor();
    TORCH_CHECK_INDEX(
        at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
        "embedding: an index is out of range");
    if (part.size == 0) return torch::jit::Stack{t.new_zeros(local)};
    const at::Tensor rows =
        t.index_select(0, (at - part.begin).clamp(0, part.size - 1).reshape(-1)).view(local);
    return torch::jit::Stack{masked(rows, part.mine(at), 0)};
  };
  return plan;
}

Plan embedding_backward(const OpCall& call) {
  const TensorInfo& indices = *call.find("indices");
  const TensorInfo& g = *call.find("grad_output");
  const int n = indices.spec.dims();
  LabelProblem p(call);
  label_arguments(p, {{"grad_output", all_labels(n + 1)}, {"indices", all_labels(n)}});
  p.outputs = {{kWhole, n}};
  p.output_shapes = {{call.integer("num_weights"), g.spec.shape()[n]}};
  p.contract = first_dims(n);
  // the frequency is that of the whole batch
  if (call.argument("scale_grad_by_freq") >= 0 && call.boolean("scale_grad_by_freq"))
    p.contract.clear();
  return solve(p);
}

const bool registered = [] {
  register_rule("aten::embedding", embedding);
  register_rule("aten::embedding_dense_backward", embedding_backward);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::embedding_rules
