// Operators of libtorch that are made of others, and backward formulas that make plain tensors of
// the global shape, written so that what they make is sharded.

#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace tessera::detail {

namespace {

// Zeros of `sizes` that are cut as `like`, whose dims are the same but for `dim`, along which they
// are whole.
at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes) {
  const at::Tensor slice =
      like.size(dim) == 0 ? like.new_zeros({}).reshape(std::vector<std::int64_t>(like.dim(), 1))
                          : like.narrow(dim, 0, 1);
  return at::zeros_like(slice.expand_symint(sizes));
}

// Of max.dim, sort, topk, kthvalue, mode...: the gradient goes where the values came from.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, std::int64_t dim,
                                              const at::Tensor& indices, c10::SymIntArrayRef sizes,
                                              bool keepdim) {
  if (sizes.empty()) return grad.reshape({}) * 1;
  const bool unsqueeze = !keepdim;
  const at::Tensor g = unsqueeze ? grad.unsqueeze(dim) : grad,
                   at = unsqueeze ? indices.unsqueeze(dim) : indices;
  return zeros_along(g, dim, sizes).scatter(dim, at, g);
}

at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& indices, std::int64_t dim) {
  if (input.numel() == 0) return input;
  return at::zeros_like(input).scatter_add(dim, indices, grad);
}

at::Tensor index_select_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes,
                                 std::int64_t dim, const at::Tensor& index) {
  if (sizes.empty()) return at::zeros_like(grad.sum()).index_add(dim, index, grad);
  return zeros_along(grad, dim, sizes).index_add(dim, index, grad);
}

// The first elements of the source were taken, the others have no gradient.
at::Tensor masked_scatter_backward(const at::Tensor& grad, const at::Tensor& mask,
                                   c10::SymIntArrayRef sizes) {
  c10::SymInt count = 1;
  for (const c10::SymInt& n : sizes) count = count * n;
  at::Tensor picked = grad.masked_select(mask);
  const c10::SymInt missing = count - picked.sym_numel();
  if (missing > 0) picked = at::cat({picked, picked.new_zeros_symint({missing})}, 0);
  return picked.view_symint(sizes);
}

// libtorch's own begins with zeros that lie like the gradient, which may be whole where the indices
// are cut.
at::Tensor gather_backward(const at::Tensor& grad, const at::Tensor& self, std::int64_t dim,
                           const at::Tensor& index, bool sparse) {
  TORCH_CHECK(
      !sparse,
      "gather: sparse gradients are not supported for sharded tensors: leave out sparse_grad");
  return at::zeros_like(self).scatter_add(dim, index, grad);
}

// Each rank sums the diagonal's elements that it holds. libtorch's own derivative writes into a
// plain tensor of the global size.
at::Tensor trace(const at::Tensor& self) {
  TORCH_CHECK(self.dim() == 2, "trace: expected a matrix, but got a tensor of ", self.dim(),
              " dims");
  return self.tril().triu().sum();
}

// The tensors of a list may lie anywhere: each has a norm of its own (clip_grad_norm_).
std::vector<at::Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order,
                                     std::optional<at::ScalarType> dtype) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& t : tensors)
    norms.push_back(at::linalg_vector_norm(t, order, std::nullopt, false, dtype));
  return norms;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("gather_backward", gather_backward);
  m.impl("trace", trace);
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  m.impl("_foreach_norm.Scalar", foreach_norm);
  m.impl("cummaxmin_backward", cummaxmin_backward);
  m.impl("index_select_backward", index_select_backward);
  m.impl("masked_scatter_backward", masked_scatter_backward);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse2, m) {
  m.impl("gather_backward", gather_backward);
  m.impl("trace", trace);
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  m.impl("cummaxmin_backward", cummaxmin_backward);
  m.impl("index_select_backward", index_select_backward);
  m.impl("masked_scatter_backward", masked_scatter_backward);
  m.impl("_foreach_norm.Scalar", foreach_norm);
}

}  // namespace tessera::detail
