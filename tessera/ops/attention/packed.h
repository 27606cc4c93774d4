#pragma once
// Attention over documents of unequal lengths that are packed into one sequence: each token attends
// inside its own document alone. For plain tensors, and for sharded ones, whose tokens may be cut
// over ranks anywhere (context parallelism).
//
//   const auto cut = cut_documents({{700, 20, 300}}, mesh.size(), {.causal = true});
//   const ShardSpec where(mesh, {1, heads, 1020, channels}, {Shard(2)}, {{2, cut.sizes}});
//   at::Tensor out = packed_attention(q, k, v, {{700, 20, 300}}, {.causal = true});

#include <ATen/core/Tensor.h>

#include <optional>

#include "tessera/partition/documents.h"

namespace tessera {

struct PackedAttentionOptions {
  /// A token attends to those before it in its document and to itself; else to all of its document.
  bool causal = false;
  /// The scores are multiplied by it; absent: 1 / sqrt(channels).
  std::optional<double> scale = std::nullopt;
  /// Whether k and v may have fewer heads, each for as many consecutive heads of q.
  bool grouped = false;
  /// Probability with which a weight is dropped.
  double dropout = 0;
};

/// softmax(q k' * scale) v inside each document. q, k: rows x heads x tokens x channels, as for
/// scaled_dot_product_attention, or without rows; v likewise, with any number of channels.
/// `lengths`: of the documents of each row, or one list for all rows, the same on every rank (of
/// cumulative ones: their differences). Tokens after the last document are padding: they attend to
/// nothing, give zeros and get no gradient. Twice differentiable where the tokens are cut.
///
/// Sharded tensors: rows, heads (of grouped queries whole groups) and tokens over any axes with any
/// sizes. k and v are laid out as q where they differ. Keys and values travel from the rank that
/// has them to those whose queries see them, no others; nothing of tokens x tokens is held.
///
/// Throws on every rank InvalidArgument for shapes, types or lengths that do not fit each other, a
/// probability outside [0, 1]; MismatchError; ImplicitRedistributionError by the policy.
at::Tensor packed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const DocumentLengths& lengths,
                            const PackedAttentionOptions& options = {});

}  // namespace tessera
