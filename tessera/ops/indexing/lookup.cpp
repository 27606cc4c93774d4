// Values looked up in a tensor that is replicated, and selections whose number depends on the data,
// which are gathered.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/one_hot_native.h>
#include <ATen/ops/repeat_interleave.h>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/carry.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::lookup_rules {

namespace {

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

// Each value is looked up in the sequence, or in that of its row: which must be complete. Of a
// sorter all ranks see all, since libtorch checks its numbers.
Plan searchsorted(const OpCall& call) {
  if (call.find("sorter")) return on_gathered(call);
  const TensorInfo &sequence = *call.find("sorted_sequence"), &values = *call.find("self");
  const int n = values.spec.dims();
  const bool by_row = sequence.spec.dims() > 1;
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    Labels labels =
        by_row && t.spec.dims() == n ? all_labels(n) : Labels(t.spec.dims(), kUnsharded);
    if (&t == &values) {
      labels = all_labels(n);
    } else if (!labels.empty()) {
      labels.back() = kUnsharded;
    }
    p.inputs.push_back(labels);
  }
  p.outputs = {all_labels(n)};
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

}  // namespace tessera::detail::lookup_rules
