#pragma once
// Tables whose rows are asked for: each rank asks the owners of the rows that its ids name, each
// row once, and backward sends the sum of each row's gradients back to its owner. Neither the table
// nor its gradient moves.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// True for a table that is used so: sharded along its rows and marked to stay, or with a sparse
/// gradient, sharded along rows, columns or not at all. Throws ShardingError for one with a sparse
/// gradient that units of fully_shard() gather.
bool rows_are_asked_for(const at::Tensor& weight, bool sparse);

struct TableOptions {
  /// A row without a gradient; -1: there is none.
  std::int64_t padding = -1;
  bool by_frequency = false;
  /// The table's gradient.
  bool sparse = false;
};

struct TableRows {
  /// The distinct rows that the ids name, a plain tensor [n, columns of this rank]. Differentiable.
  at::Tensor rows;
  /// The row of each id.
  at::Tensor place;
};

/// `ids`: of this rank, plain, [n]; equal on the ranks of axes that shard the table's columns.
/// `sharded_by`: the placements of what the ids index. Collective over the axes that shard the
/// table's rows, in backward also over others that shard ids. Throws IndexError for an id out of
/// range, which the other ranks are told.
TableRows table_rows(const at::Tensor& weight, const at::Tensor& ids,
                     const std::vector<Placement>& sharded_by, const TableOptions& options);

/// The integers of a tensor, in host memory; and a tensor of such on the device of `like`.
Sizes host_numbers(const at::Tensor& t);
at::Tensor tensor_of(const Sizes& numbers, const at::Tensor& like);

/// The spec of what these ids name: their dims, then the columns of the table.
ShardSpec lookup_spec(const ShardSpec& ids, const ShardSpec& table,
                      std::vector<Placement> placements);
/// The placements with Replicate in place of Partial and on the axes that shard the table's
/// columns.
std::vector<Placement> beside_columns(const ShardSpec& table, std::vector<Placement> placements);
/// Those of the result of a lookup: columns are dim `d`.
std::vector<Placement> with_columns(const ShardSpec& table, std::vector<Placement> placements,
                                    int d);

// Bags of embeddings of such a table: indices go to the ranks that have their bags, the rows that
// these name come from their owners, and each rank makes its own bags.

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
