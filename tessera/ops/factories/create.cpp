// Tensors like another one.

#include <ATen/ops/zeros_like.h>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::create_rules {
namespace {

// The result has the input's placements, with Replicate in place of Partial.
Plan like(const OpCall& call) { return {.outputs = {{without_partial(call.tensor(0).spec)}}}; }

// True if only dims that are not sharded differ in size.
bool fits(const ShardSpec& in, const Shape& size) {
  if (static_cast<int>(size.size()) != in.dims()) return false;
  for (int d = 0; d < in.dims(); ++d)
    if (in.is_sharded(d) && size[d] != in.shape()[d]) return false;
  return true;
}

// new_zeros(size): sharded like the input if its sharded dims are as large, else replicated. In
// backward it is what the gradient of a selection or a transform is written to.
Plan sized(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  const Shape size = call.integers("size");
  const Labels from = fits(in, size) ? all_labels(in.dims()) : Labels(size.size(), -1);
  const ShardSpec out = mapped_spec(in, size, from, false);
  Plan plan{.outputs = {{out}}, .arguments = {{call.argument("size"), out.local_shape()}}};
  if (call.argument("stride") >= 0) {
    const Shape strides = call.integers("stride");
    plan.outputs[0].strides = strides;
    plan.arguments.emplace_back(call.argument("stride"),
                                strides_in_order(out.local_shape(), strides));
  }
  return plan;
}

// libtorch writes ones through other strides.
at::Tensor& eye(c10::SymInt n, c10::SymInt m, at::Tensor& out) {
  const Shape shape{n.expect_int(), m.expect_int()};
  TORCH_CHECK(shape[0] >= 0 && shape[1] >= 0, "eye: sizes must not be negative, they are ", shape);
  if (out.sizes() != at::IntArrayRef(shape)) out.resize_(shape);
  out.zero_();
  return out.numel() > 0 ? out.fill_diagonal_(1) : out;
}
at::Tensor& square_eye(c10::SymInt n, at::Tensor& out) { return eye(n, n, out); }

// The zeros of a base, to which forward mode writes the tangent of a view of it.
Plan zeros_of_base(const OpCall& call) {
  if (call.integer("self_num_batch_dims") != 0)
    throw ShardingError("forward mode of sharded tensors cannot be batched");
  const TensorInfo* base = call.find("other");
  if (!base) throw ShardingError(call.name(), " of a plain base");
  return {.outputs = {{without_partial(base->spec), base->strides}},
          .local = [](const OperatorHandle&, const Stack& a) {
            return Stack{at::zeros_like(a[1].toTensor(), a[0].toTensor().options())};
          }};
}

// set_(): the target takes the memory of a tensor that lies as it does; elsewhere it is a copy.
Plan set(const OpCall& call) {
  const TensorInfo *self = call.find("self"), *source = call.find("source");
  if (!self || !source || !(self->spec == source->spec) || self->strides != source->strides ||
      self->dtype != source->dtype)
    throw ShardingError(call.name(), " of ", call.tensor(0).spec,
                        ": the source must lie as the target does. First redistribute it, "
                        "or write to the target with copy_().");
  return {.outputs = {{source->spec, source->strides}},
          .local = [](const OperatorHandle&, const Stack& a) { return Stack{a[1]}; }};
}

const AtStart registered([] {
  register_rules({"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like"},
                 like);
  register_rules({"aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full",
                  "aten::new_empty_strided"},
                 sized);
  register_rule("aten::tril_indices", on_gathered);
  register_rule("aten::set.source_Tensor", set);
  register_rule("aten::_new_zeros_with_same_feature_meta", zeros_of_base);
  register_decomposition("eye.out", square_eye);
  register_decomposition("eye.m_out", eye);
  // The memory of a sharded tensor is that of its locals.
  register_decomposition("is_pinned",
                         [](const at::Tensor&, std::optional<c10::Device>) { return false; });
});

}  // namespace
}  // namespace tessera::detail::create_rules
