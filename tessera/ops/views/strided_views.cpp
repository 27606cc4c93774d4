// as_strided: strides describe the global memory, which no rank has. A rank takes the view where
// every element stays where it is, or where all lies within rows that it has.

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"

namespace tessera::detail::strided_views_rules {
namespace {

// True if every element stays where it is. The stride of a dim of one element has no meaning.
bool same_elements(const Shape& shape, const Shape& strides, std::int64_t offset, const Shape& size,
                   const Shape& stride, std::optional<std::int64_t> from) {
  if (size != shape || stride.size() != size.size() || from.value_or(offset) != offset)
    return false;
  const bool empty = std::ranges::find(shape, 0) != shape.end();
  for (std::size_t d = 0; d < size.size(); ++d)
    if (size[d] != 1 && stride[d] != strides[d] && !empty) return false;
  return true;
}

// In place every element stays, and so does its gradient. Autograd would differentiate it by way of
// a tensor of the global memory, for which the gradient is gathered.
bool same_elements_in_place(Stack* stack) {
  const c10::IValue* asked = stack->data() + stack->size() - 3;
  const at::Tensor& self = asked[-1].toTensor();
  if (!meta_of(self)) return false;
  const auto integers = [](const c10::IValue& list_of) {
    return mapped(list_of.toListRef(), [](const c10::IValue& n) { return n.toInt(); });
  };
  const Shape size = integers(asked[0]), stride = integers(asked[1]);
  const auto from = asked[2].toOptional<std::int64_t>();
  if (!same_elements(self.sizes().vec(), self.strides().vec(), self.storage_offset(), size, stride,
                     from))
    return false;
  {
    const BelowAutogradGuard guard;
    self.as_strided_(size, stride, from);
  }
  stack->resize(stack->size() - 3);
  return true;
}

// A view of what was gathered lies in memory of its own, to which strides of the global memory say
// nothing.
bool require_global_memory(Stack* stack, std::size_t count) {
  const at::Tensor& self = (*stack)[stack->size() - count].toTensor();
  const ShardMeta* meta = meta_of(self);
  if (!meta || !meta->copy || !meta->spec().is_replicated()) return false;
  bool same = stack->back().isNone() || meta->local.storage_offset() == meta->layout->offset;
  for (std::int64_t d = 0; d < self.dim(); ++d)
    same &= self.size(d) == 1 || meta->local.stride(d) == meta->layout->strides[d];
  if (!same)
    throw ShardingError("as_strided of a view of ", meta_of(meta->copy->base)->spec(),
                        " that had to be gathered: strides have no meaning in its memory. "
                        "Use slices, permute and expand, or clone it first.");
  return false;
}

// For each dim of the result the sharded dim of the tensor that it is, or -1, if all others lie
// within one dense row of the sharded ones: then each rank takes the view of its own rows. nullopt
// if they do not.
std::optional<std::vector<int>> within_rows(const TensorInfo& t, const Shape& size,
                                            const Shape& stride, std::int64_t skipped) {
  if (size.size() != stride.size() || skipped < 0 || t.spec.numel() == 0) return std::nullopt;
  std::vector<int> of(size.size(), -1);
  std::int64_t row = 1, last = skipped;
  for (int d = 0; d < t.spec.dims(); ++d) row *= t.spec.is_sharded(d) ? 1 : t.spec.shape()[d];
  for (int d = 0; d < t.spec.dims(); ++d) {
    if (!t.spec.is_sharded(d)) {
      if (t.spec.shape()[d] > 1 && t.strides[d] >= row) return std::nullopt;
      continue;
    }
    std::size_t k = 0;
    while (k < size.size() &&
           (of[k] >= 0 || size[k] != t.spec.shape()[d] || stride[k] != t.strides[d]))
      ++k;
    if (k == size.size() || t.strides[d] < row) return std::nullopt;
    of[k] = d;
  }
  for (std::size_t k = 0; k < size.size(); ++k) {
    if (stride[k] < 0 || size[k] == 0) return std::nullopt;
    if (of[k] < 0) last += (size[k] - 1) * stride[k];
  }
  return last < row ? std::optional(of) : std::nullopt;
}

Plan as_strided_within_rows(const TensorInfo& t, const std::vector<int>& of, const Shape& size,
                            const Shape& stride, std::int64_t skipped) {
  const ShardSpec out = mapped_spec(t.spec, size, of, true);
  Plan plan{.outputs = {{out, stride}}};
  plan.local = [=, shape = t.spec.shape(), strides = t.strides, sizes = out.local_shape()](
                   const OperatorHandle&, Stack arguments) {
    const at::Tensor& local = arguments[0].toTensor();
    Shape own = stride;
    for (std::size_t k = 0; k < of.size(); ++k)
      if (of[k] >= 0) own[k] = local.stride(of[k]);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const bool sharded = std::ranges::find(of, static_cast<int>(d)) != of.end();
      if (!sharded && shape[d] > 1 && local.numel() > 0 &&
          local.stride(static_cast<std::int64_t>(d)) != strides[d])
        throw ShardingError("as_strided: this rank's rows lie in another order: clone it first");
    }
    return Stack{local.as_strided(sizes, own, local.storage_offset() + skipped)};
  };
  return plan;
}

Plan as_strided(const OpCall& call) {
  const TensorInfo& t = call.tensor(0);
  const auto from =
      call.has("storage_offset") ? std::optional(call.integer("storage_offset")) : std::nullopt;
  const Shape size = call.integers("size"), stride = call.integers("stride");
  if (!same_elements(t.spec.shape(), t.strides, t.offset, size, stride, from)) {
    const std::int64_t skipped = from.value_or(t.offset) - t.offset;
    if (const auto of = within_rows(t, size, stride, skipped))
      return as_strided_within_rows(t, *of, size, stride, skipped);
    throw ShardingError("as_strided of a sharded tensor ", t.spec, " with size ", list(size),
                        " and stride ", list(stride),
                        ": strides have no meaning across ranks. Use slices, permute and "
                        "expand, or redistribute to Replicate first.");
  }
  return {.outputs = {{t.spec}}, .local = [](const OperatorHandle&, Stack arguments) {
            return Stack{arguments[0].toTensor().alias()};
          }};
}

const AtStart registered([] {
  register_rule("aten::as_strided", as_strided);
  register_above("aten::as_strided_", same_elements_in_place);
  for (const char* op : {"aten::as_strided", "aten::as_strided_copy"})
    register_above(op, [](Stack* stack) { return require_global_memory(stack, 4); });
  register_above("aten::as_strided_scatter",
                 [](Stack* stack) { return require_global_memory(stack, 5); });
});

}  // namespace
}  // namespace tessera::detail::strided_views_rules
