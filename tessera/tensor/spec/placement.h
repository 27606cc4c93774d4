#pragma once
// Placement: how a tensor is spread along one axis of a mesh.

#include <ostream>
#include <string>

#include "tessera/comm/group/types.h"

namespace tessera {

/// How a tensor is spread along one axis of a mesh. Replicate: every rank of the axis holds the
/// same. Shard: the ranks hold consecutive shards of `dim`, which may be of any sizes. Partial: the
/// value is the reduction `op` over the ranks' locals.
struct Placement {
  enum class Kind : unsigned char { replicate, shard, partial };
  Kind kind = Kind::replicate;
  /// The dim that is sharded, if kind is shard.
  int dim = 0;
  /// The reduction that gives the value, if kind is partial.
  ReduceOp::Kind op = ReduceOp::Kind::sum;

  bool is_replicate() const { return kind == Kind::replicate; }
  bool is_shard() const { return kind == Kind::shard; }
  bool is_shard(int d) const { return kind == Kind::shard && dim == d; }
  bool is_partial() const { return kind == Kind::partial; }
  bool is_partial(ReduceOp::Kind o) const { return kind == Kind::partial && op == o; }
  bool operator==(const Placement& other) const {
    return kind == other.kind && (kind != Kind::shard || dim == other.dim) &&
           (kind != Kind::partial || op == other.op);
  }
};

/// Every rank of the axis holds the same.
inline Placement Replicate() { return {}; }
/// The ranks of the axis hold shards of `dim`; a negative `dim` counts from the last one.
inline Placement Shard(int dim) { return {Placement::Kind::shard, dim, ReduceOp::Kind::sum}; }
/// The value is the reduction `op` over the ranks of the axis: sum, avg (the unweighted mean over
/// ranks, which no operator makes by itself), product, min or max.
inline Placement Partial(ReduceOp::Kind op = ReduceOp::Kind::sum) {
  return {Placement::Kind::partial, 0, op};
}

/// "Replicate", "Shard(1)", "Partial(sum)".
std::string to_string(const Placement& placement);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

/// How the data before and after a sharded layer lie on the axis that shards it, where they may be
/// sharded along their sequence (sequence parallelism). Kept with the weight of a linear layer or
/// an embedding that is sharded over `axis`; operators compute with the shards of the weight.
///
/// `dim` at least 0: sharded along `dim`. A linear layer whose rows (output features) are sharded
/// gathers its input over the axis, in backward again, and reduce-scatters the input's gradient;
/// one whose columns are, and a table whose rows are, reduce-scatters its result, and gathers the
/// result's gradient. The policy on redistribution does not apply: the weight asks for it.
///
/// `dim` -1: replicated. A linear layer whose columns are sharded has a Partial result, which is
/// all-reduced where it is used; what of its gradient is Partial over the axis is all-reduced once,
/// for all that use it.
struct SequenceSharding {
  /// It is the mesh's; -1: the weight belongs to no plan, and nothing is said of the data.
  int axis = -1;
  /// It is the data's, counted from the first; -1: they are replicated over the axis.
  int dim = 0;

  explicit operator bool() const { return axis >= 0; }
  bool operator==(const SequenceSharding&) const = default;
};

}  // namespace tessera
