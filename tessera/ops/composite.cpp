// Backward formulas of libtorch that make plain tensors of the global shape, written so that what they make is sharded.

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace tessera::detail {

namespace {

// Of max.dim, sort, topk, kthvalue, mode...: the gradient goes where the values came from.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, std::int64_t dim, const at::Tensor& indices, c10::SymIntArrayRef sizes,
                                              bool keepdim) {
  const bool unsqueeze = !keepdim && !sizes.empty();
  const at::Tensor g = unsqueeze ? grad.unsqueeze(dim) : grad, at = unsqueeze ? indices.unsqueeze(dim) : indices;
  if (sizes.empty()) return g.reshape({}) * at::ones_like(g).reshape({});
  // One slice along dim, stretched: every other dim keeps its parts.
  const at::Tensor zeros = at::zeros_like(g.narrow(dim, 0, std::min<std::int64_t>(g.size(dim), 1)).expand_symint(sizes));
  return zeros.scatter(dim, at, g);
}

// The tensors of a list may lie anywhere: each has a norm of its own (clip_grad_norm_).
std::vector<at::Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& t : tensors) norms.push_back(at::linalg_vector_norm(t, order, std::nullopt, false, dtype));
  return norms;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  m.impl("_foreach_norm.Scalar", foreach_norm);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse2, m) {
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  m.impl("_foreach_norm.Scalar", foreach_norm);
}

}  // namespace tessera::detail
