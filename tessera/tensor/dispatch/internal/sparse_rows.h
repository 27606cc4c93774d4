#pragma once
// Sparse gradients of sharded tables: a tensor with a spec whose locals are sparse, each with the
// rows of its own shard that have a gradient. The table's .grad is one. Sums of such tensors and
// multiples of them are there, and adding one to a dense tensor; other operators are refused.

#include <ATen/core/Tensor.h>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// `local`: sparse, of the local shape of the spec, with one sparse dim, coalesced.
at::Tensor wrap_sparse(const at::Tensor& local, const ShardSpec& spec);
/// The tensor with dense locals; dense ones as they are.
at::Tensor with_dense_locals(const at::Tensor& sharded);

/// Values of equal numbers added up: a coalesced sparse tensor of `shape`, whose dim 0 the `ids`
/// count. `ids`: [n], `values`: [n, ...]. `distinct`: they are in ascending order, each once.
at::Tensor summed_rows(const at::Tensor& ids, const at::Tensor& values, at::IntArrayRef shape,
                       bool distinct = false);

}  // namespace tessera::detail
