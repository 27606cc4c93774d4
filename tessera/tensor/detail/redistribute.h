#pragma once
// Redistribution of locals: from one spec to another of the same mesh and shape.

#include <ATen/core/Tensor.h>

#include "tessera/tensor/spec.h"

namespace tessera::detail {

/// This rank's local under `to`, made from its local under `from`. Collective over the axes that change. The result may share memory with `local`.
at::Tensor redistribute_local(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to);

/// A rank-independent estimate of the elements that one rank receives, for choosing between plans. Reducing a partial value counts too.
double elements_moved(const ShardSpec& from, const ShardSpec& to);

/// Whether shards travel (a partial value that is reduced does not count).
bool moves_shards(const ShardSpec& from, const ShardSpec& to);

}  // namespace tessera::detail
