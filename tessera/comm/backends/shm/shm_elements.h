#pragma once
// What tessera/shm calls the dtypes and the reductions of c10d.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>

#include "tessera/comm/group/types.h"
#include "tessera/shm/types.h"

namespace tessera::detail {

/// nullopt for dtypes without arithmetic here.
std::optional<shm::Element> element_of(c10::ScalarType dtype);
shm::Reduction::Kind kind_of(ReduceOp::Kind op);

/// What a reduction works on.
struct Reduces {
  shm::Element element;
  shm::Reduction reduction;
};

/// Throws InvalidArgument if there is no such reduction.
Reduces reduces_of(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace tessera::detail
