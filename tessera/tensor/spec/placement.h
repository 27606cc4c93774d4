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

}  // namespace tessera
