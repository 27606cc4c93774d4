// Joins: along any dim but the joined one the inputs may be sharded.

#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail::cat_and_stack_rules {

namespace {

Plan cat(const OpCall& call) {
  // Empty tensors of one dim are allowed among others and say nothing.
  std::size_t first = 0;
  while (first + 1 < call.tensors().size() && call.tensor(first).spec.dims() == 1 &&
         call.tensor(first).spec.numel() == 0)
    ++first;
  const int n = call.tensor(first).spec.dims();
  for (const TensorInfo& t : call.tensors()) {
    if (t.spec.dims() == 0)
      throw InvalidArgument("aten::cat: a tensor without dims cannot be concatenated; use stack");
  }
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  Labels labels = all_labels(n);
  labels[d] = kWhole;
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(t.spec.dims() == n ? labels : Labels(t.spec.dims(), kWhole));
  p.outputs = {labels};
  p.linear = LabelProblem::Linear::together;
  return solve(p);
}

Plan stack(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n + 1));
  LabelProblem p(call);
  p.inputs.assign(call.tensors().size(), all_labels(n));
  Labels out = all_labels(n);
  out.insert(out.begin() + d, kWhole);
  p.outputs = {out};
  p.linear = LabelProblem::Linear::together;
  return solve(p);
}

const bool registered = [] {
  register_rule("aten::cat", cat);
  register_rule("aten::stack", stack);
  for (const char* op : {"aten::block_diag", "aten::_chunk_cat"}) register_rule(op, on_whole);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::cat_and_stack_rules
