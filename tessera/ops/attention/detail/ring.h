#pragma once
// Attention over a sharded sequence, below autograd: the layout of a call, and one rank's way round
// the ring on which keys and values are passed. ring_attention.cpp says how they are used.

#include <c10/core/ScalarType.h>

#include <limits>
#include <string_view>

#include "tessera/comm/group/group.h"
#include "tessera/ops/random/detail/draws.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/partition/interval.h"

namespace tessera::detail::ring_attention_rules {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// document_bounds() of each row of the batch, or once for all rows; empty: no documents.
using Documents = std::vector<std::vector<std::int64_t>>;

/// The layout of a call; the same for forward and backward.
struct Ring {
  std::shared_ptr<MeshContext> context;
  /// Along which keys and values are passed.
  std::vector<int> axes;
  ShardSpec query, key, value, mask, out;
  ShardSpec key_gradient, value_gradient, mask_gradient;
  bool causal = false;
  double scale = 1;
  /// Heads of queries per head of keys.
  std::int64_t repeat = 1;
  double dropout = 0;
  /// Of the dropout.
  DrawPosition draw;
  /// If there are any, keys lie as the queries, and go straight from their ranks to those that see
  /// them.
  Documents documents;

  int dims() const { return query.dims(); }
  int sequence() const { return dims() - 2; }
};

using RingPtr = std::shared_ptr<const Ring>;

/// What is asked for besides query, key and value; `name`: of the operator, for errors.
struct AttentionCall {
  std::string name;
  double dropout = 0;
  bool causal = false;
  std::optional<double> scale;
  bool grouped = false;
  Documents documents = {};
};

/// The ring's layout; nullptr if libtorch's own composite is to be used.
std::shared_ptr<Ring> plan_ring(const ShardSpec& q, const ShardSpec& k, const ShardSpec& v,
                                const ShardSpec& mask, const AttentionCall& call);

/// Whether the second last dim of a sharded tensor is cut over more than one rank.
bool shards_sequence(const at::Tensor& t);

/// Attention by a ring, also of one rank; plain arguments beside sharded ones are promoted.
/// Undefined if the shapes do not fit a ring.
at::Tensor on_ring(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, const AttentionCall& call);

at::Tensor repeated(const at::Tensor& t, std::int64_t times);
/// The columns of a mask, or of its gradient, that belong to these keys.
at::Tensor of_columns(const at::Tensor& mask, const Interval& keys);

/// A run of the queries that this rank computes: where it is in the local tensors, and the global
/// index of its first; `row`: in this row of the local batch, -1: in all.
struct Run {
  std::int64_t at, count, begin, row = -1;
};

/// Queries that are computed together, and the keys that some of them see.
struct Block {
  Run run;
  Interval keys;
};

/// One rank's way round the ring.
struct Round {
  const Ring& ring;
  const Group group;
  const int ranks, me;
  /// Of the keys, one shard per rank of the ring.
  const Partition* parts;
  at::ScalarType type;
  std::vector<Run> runs;
  /// The rank with which halves of the queries are exchanged; this rank itself: with none.
  int mirror;
  /// Queries of the first half, which stays, and of the second ones of both ranks.
  std::int64_t first = 0, second = 0, second_of_mirror = 0;

  Round(const Ring& r, at::ScalarType t);

  int owner(int step) const { return (me + step) % ranks; }
  Interval columns(int rank) const;
  /// What is computed with these keys.
  std::vector<Block> blocks(const Interval& keys) const;

  /// Sends `mine` to a rank, and receives what another one has, of `rows` rows; -1: none.
  Request pass(const std::vector<at::Tensor>& mine, std::vector<at::Tensor>& next,
               std::int64_t rows, int to, int from, std::string_view name = "ring attention") const;
  /// Exchanges what follows the first half, of which this rank then has `rows`.
  std::vector<at::Tensor> exchanged(const std::vector<at::Tensor>& mine, std::int64_t rows) const;
  /// Tensors of this rank's own queries as those of the queries that it computes, and back.
  std::vector<at::Tensor> dealt(const std::vector<at::Tensor>& mine) const {
    return exchanged(mine, second_of_mirror);
  }
  std::vector<at::Tensor> returned(const std::vector<at::Tensor>& computed) const {
    return exchanged(computed, second);
  }

  /// Scores of a run of (scaled) queries with one shard of the keys.
  at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                    const Interval& keys, const Run& run) const;
  /// For weights like `p`: 1 / (1 - dropout) where they are kept, else 0; undefined without
  /// dropout.
  at::Tensor kept(const at::Tensor& p, const Interval& keys, const Run& run) const;
};

}  // namespace tessera::detail::ring_attention_rules
