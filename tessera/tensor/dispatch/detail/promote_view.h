#pragma once
// A slice of a plain tensor that a sharded value is written to, as models write it: out =
// zeros(...); out[..., :m] = value. All of `out` becomes sharded, and the slice a view of it.

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

/// Makes `base` sharded, and `target`, a view of it, a view of that, both in place. Dims that the
/// slice takes completely are sharded as `like` shards them (undefined: none), the others
/// replicated: nothing is sent, since plain tensors are the same on all ranks. `above`: autograd
/// has not run yet. Returns false, with nothing changed, if the view does not consist of slices and
/// selects.
bool promote_view(const at::Tensor& target, const at::Tensor& base, const at::Tensor& like,
                  const std::shared_ptr<MeshContext>& context, bool above);

}  // namespace tessera::detail
