#include "tessera/ops/rules/detail/decomposition.h"

#include <ATen/ops/zeros_like.h>

#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes) {
  const at::Tensor slice =
      like.size(dim) == 0 ? like.new_zeros({}).reshape(std::vector<std::int64_t>(like.dim(), 1))
                          : like.narrow(dim, 0, 1);
  return at::zeros_like(slice.expand_symint(sizes));
}

torch::Library& decompositions_above_autograd() {
  static torch::Library library(torch::Library::IMPL, "aten", kShardAutogradKey, __FILE__,
                                __LINE__);
  return library;
}

torch::Library& decompositions_below_autograd() {
  static torch::Library library(torch::Library::IMPL, "aten", kShardKey, __FILE__, __LINE__);
  return library;
}

}  // namespace tessera::detail
