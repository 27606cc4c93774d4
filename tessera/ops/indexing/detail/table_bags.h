#pragma once
// Bags of embeddings of a table whose rows are asked for: indices go to the ranks that have their
// bags, the rows that these name come from their owners, and each rank makes its own bags.

#include <tuple>

#include "tessera/ops/indexing/detail/table_rows.h"

namespace tessera::detail {

struct BagOptions {
  /// 0 sum, 1 mean, 2 max.
  int mode = 0;
  bool include_last = false;
  TableOptions table;
};

/// What aten::embedding_bag returns: bags, the bag of each index, the size of each bag, and zeros.
/// Bags are sharded as the offsets are, or, where these are replicated, lie where their first index
/// does. `weights`: of the samples, undefined: none. Tensors are sharded but for the offsets, which
/// may be plain. Collective over the mesh. Throws InvalidArgument for offsets that do not begin at
/// 0, decrease or go beyond the indices, on every rank or told to the others.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bags_of_table(const at::Tensor& table,
                                                                         const at::Tensor& indices,
                                                                         const at::Tensor& offsets,
                                                                         const at::Tensor& weights,
                                                                         const BagOptions& options);

}  // namespace tessera::detail
