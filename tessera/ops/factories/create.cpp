// Tensors like another one.

#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::create_rules {

namespace {

using Shape = std::vector<std::int64_t>;

// The result has the input's placements, with Replicate in place of Partial.
Plan like(const OpCall& call) {
  Plan plan;
  plan.outputs = {{without_partial(call.tensor(0).spec)}};
  return plan;
}

// new_zeros(size): sharded like the input if the shape is the same, else replicated.
Plan sized(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  const Shape size = call.integers("size");
  const ShardSpec out = size == in.shape()
                            ? without_partial(in)
                            : mapped_spec(in, size, std::vector<int>(size.size(), -1), false);
  Plan plan;
  plan.outputs = {{out}};
  plan.arguments = {
      {call.argument("size"), c10::IValue(c10::List<std::int64_t>(out.local_shape()))}};
  if (call.argument("stride") >= 0) {
    plan.outputs[0].strides = call.integers("stride");
    plan.arguments.emplace_back(call.argument("stride"),
                                c10::IValue(c10::List<std::int64_t>(
                                    strides_in_order(out.local_shape(), call.integers("stride")))));
  }
  return plan;
}

const bool registered = [] {
  for (const char* op :
       {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like"})
    register_rule(op, like);
  for (const char* op : {"aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full",
                         "aten::new_empty_strided"})
    register_rule(op, sized);
  register_rule("aten::tril_indices", on_gathered);
  // The memory of a sharded tensor is that of its locals.
  register_decomposition("is_pinned",
                         [](const at::Tensor&, std::optional<c10::Device>) { return false; });
  return true;
}();

}  // namespace

}  // namespace tessera::detail::create_rules
