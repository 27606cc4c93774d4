// Weight norm: the direction of a weight and its length, apart (Salimans and Kingma, 2016).

#include <ATen/ops/norm_except_dim.h>

#include <tuple>

#include "tessera/ops/rules/detail/decomposition.h"
#include "tessera/ops/rules/detail/labels.h"

namespace tessera::detail::weight_norm_rules {

namespace {

std::tuple<at::Tensor, at::Tensor> weight_norm(const at::Tensor& v, const at::Tensor& g,
                                               std::int64_t dim) {
  const at::Tensor norm = at::norm_except_dim(v, 2, dim);
  return {v * (g / norm), norm};
}

const AtStart registered([] { register_decomposition("_weight_norm_interface", weight_norm); });

}  // namespace

}  // namespace tessera::detail::weight_norm_rules
