#include "tessera/ops/rules/detail/decomposition.h"

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

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
