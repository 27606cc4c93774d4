// Values looked up in a tensor that is replicated, and selections whose number depends on the data,
// which are gathered.

#include <ATen/ops/repeat_interleave.h>

#include <optional>
#include <vector>

#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/carry.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::lookup_rules {

namespace {

using Shape = std::vector<std::int64_t>;

Plan looked_up(const OpCall& call) {
  const auto* outputs = call.outputs();
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(&t == &call.tensor(0) ? all_labels(n) : Labels(t.spec.dims(), kUnsharded));
  p.outputs = {all_labels(n)};
  if (!outputs) p.output_shapes = {shape};
  return solve(p);
}

// The index of each repeated element, from how often each is repeated. libtorch's meta kernel
// cannot say how many there are.
at::Tensor repeat_interleave(const at::Tensor& repeats, std::optional<c10::SymInt> size) {
  return promote(at::repeat_interleave_symint(full_tensor(repeats.detach()), std::move(size)),
                 context_of(meta_or_throw(repeats).spec()));
}

const bool registered = [] {
  for (const char* op :
       {"aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar", "aten::bucketize.Tensor"})
    register_rule(op, looked_up);
  for (const char* op :
       {"aten::isin.Scalar_Tensor", "aten::bucketize.Scalar", "aten::searchsorted",
        "aten::masked_select", "aten::take", "aten::nonzero", "aten::nonzero_static"})
    register_rule(op, on_gathered);
  register_decomposition("repeat_interleave.Tensor", repeat_interleave);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::lookup_rules
