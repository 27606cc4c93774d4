#pragma once
// Rows that a program has named for a while: plain tensors with as many rows that are written to
// then lie as those do, rather than whole on every rank.

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Of this thread: a spec of one dim, or empty. OwnedRowsScope (ops) sets it.
ShardSpec& rows_in_scope();

/// The spec of a tensor of this shape whose rows lie as those in scope. Empty: there are none for
/// it.
ShardSpec spec_in_scope(const std::shared_ptr<MeshContext>& context, at::IntArrayRef shape);

}  // namespace tessera::detail
