#pragma once
// Rebalancing: rows are divided anew by what they have cost, and move to their new owners with
// their ids and with what belongs to them.
//
//   const Rebalanced to = rebalance(cells, places, seconds, {u, momentum}, {.edges = edges});
//   std::cout << to.summary();      // imbalance of costs, rows moved, edge cut, ghosts
//   cells = to.rows;
//   u = to.moved[0], momentum = to.moved[1];     // row by row what they were, by id

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/ops/ghosts/owned_rows.h"
#include "tessera/partition/partitioners.h"

namespace tessera {

struct RebalanceOptions {
  /// Hilbert's curve moves little where costs change little; parts by bisection are more compact
  /// (partitioners.h).
  enum class By : unsigned char { curve, bisection } by = By::curve;
  /// The rows stay where they are while the costliest rank is within this factor of the mean.
  double tolerance = 1.05;
  /// 2 x edges by numbers of rows, as OwnedRows::edges() gives them, for what summary() says of
  /// them; every rank gathers them. Undefined: nothing is said.
  at::Tensor edges = {};
};

struct Rebalanced {
  /// The rows by their new owners, those of a rank in ascending order of their old numbers.
  OwnedRows rows;
  /// The tensors given, sharded as `rows` are.
  std::vector<at::Tensor> moved;
  /// The old number of each row, sharded as `rows` are.
  at::Tensor from;
  /// The cost of the costliest rank over the mean, before and as it is to be expected.
  double imbalance_before = 1, imbalance_after = 1;
  /// Rows of all ranks that have another owner.
  std::int64_t rows_moved = 0;
  std::optional<PartitionQuality> quality_before = {}, quality_after = {};

  /// A further tensor whose dim 0 is the rows', moved likewise: any dtype and dims; a leaf that
  /// requires a gradient if it does. Collective. Throws InvalidArgument on every rank for a tensor
  /// that is not sharded as the rows were.
  at::Tensor move(const at::Tensor& t) const;
  /// Costs and moved rows, and a line for each partition where edges were given.
  std::string summary() const;

  /// What `move` requires of a tensor.
  std::vector<std::int64_t> old_sizes = {};
};

/// `places`: owned x dims, plain or sharded. `costs`: what each owned row has cost, in any unit, or
/// one number, of all rows of this rank, which they share; a rank without rows has none. `tensors`:
/// fields, states of optimizers, whatever has a row for each of `rows`. Never makes the imbalance
/// greater: then nothing moves. Parts go to the ranks that own most of them already.
///
/// The ranks divide together: each looks at its own rows alone, and all it learns of others are
/// sums, a few numbers for each rank in each of 64 to 128 steps (times log2 of the ranks by
/// bisection). Costs count as whole numbers of 2^-61 of them all, so that the division is the same
/// over every back end. Of ranks that hold the same rows the first's costs count. Collective over
/// the mesh. Throws InvalidArgument on every rank for places,
/// costs or tensors that do not fit or are not finite, negative costs, costs that are all zero, and
/// a tolerance below 1.
Rebalanced rebalance(const OwnedRows& rows, const at::Tensor& places, const at::Tensor& costs,
                     const std::vector<at::Tensor>& tensors = {},
                     const RebalanceOptions& options = {});

}  // namespace tessera
