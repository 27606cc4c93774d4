#pragma once
// What operators by index on rows that are sharded share.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail::indexed_rows {

/// True if `index` names rows along `dim` of `x`, and both lie on the same ranks in a way that the
/// exchange of ghosts serves; false: the operator's rule knows better.
bool names_rows_of(const at::Tensor& x, std::int64_t dim, const at::Tensor& index);
/// As `x`, with dim `d` of the size and the shards of the index.
ShardSpec with_places(const ShardSpec& x, int d, const ShardSpec& index);

}  // namespace tessera::detail::indexed_rows
