#pragma once
// What tessera/shm calls the dtypes and the reductions of groups.

#include <ATen/core/Tensor.h>

#include <optional>

#include "tessera/comm/backends/transport_call.h"
#include "tessera/shm/types.h"

namespace tessera::detail {

/// nullopt for dtypes without arithmetic here.
std::optional<shm::Element> element_of(c10::ScalarType dtype);
shm::Reduction reduction_of(ReduceOp op);
inline shm::Reduction reduction_of(ReduceOp::Kind kind) { return reduction_of(ReduceOp{kind}); }

/// What a reduction works on.
struct Reduces {
  shm::Element element;
  shm::Reduction reduction;
};

/// What reduces `tensor` as the call says. Throws InvalidArgument if nothing does.
Reduces reduces_of(const char* name, const TransportCall& call, const at::Tensor& tensor);

}  // namespace tessera::detail
