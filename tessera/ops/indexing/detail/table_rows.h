#pragma once
// Tables whose rows are asked for: each rank asks the owners of the rows that its ids name, each
// row once, and backward sends the sum of each row's gradients back to its owner. Neither the table
// nor its gradient moves.

#include <ATen/core/Tensor.h>

#include <cstdint>
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

/// The placements with Replicate in place of Partial and on the axes that shard the table's
/// columns.
std::vector<Placement> beside_columns(const ShardSpec& table, std::vector<Placement> placements);
/// Those of the result of a lookup: columns are dim `d`.
std::vector<Placement> with_columns(const ShardSpec& table, std::vector<Placement> placements,
                                    int d);

}  // namespace tessera::detail
