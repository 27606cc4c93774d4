#include "tessera/ops/attention/packed.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/attention/detail/ring.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace detail::ring_attention_rules {
namespace {

void check_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::size_t lists,
                  const PackedAttentionOptions& options) {
  for (const at::Tensor* t : {&q, &k, &v}) {
    if (!t->defined() || t->dim() != q.dim() || q.dim() < 3 || q.dim() > 4)
      throw InvalidArgument(
          "packed_attention: give q, k and v of [rows, heads, tokens, channels], or all three "
          "without rows");
    if (t->scalar_type() != q.scalar_type() || !at::isFloatingType(t->scalar_type()) ||
        t->device() != q.device())
      throw InvalidArgument("packed_attention of ", q.toString(), " on ", q.device().str(), " and ",
                            t->toString(), " on ", t->device().str(),
                            "; give one floating-point type on one device");
  }
  const bool heads = k.size(-3) == q.size(-3) || (options.grouped && k.size(-3) > 0 &&
                                                  q.size(-3) > 0 && q.size(-3) % k.size(-3) == 0);
  if (!heads || (q.dim() == 4 && q.size(0) != k.size(0)) || q.size(-2) != k.size(-2) ||
      q.size(-1) != k.size(-1) || q.size(-1) < 1 ||
      k.sizes().slice(0, k.dim() - 1) != v.sizes().slice(0, k.dim() - 1))
    throw InvalidArgument(
        "packed_attention: q has shape ", list(q.sizes().vec()), ", k ", list(k.sizes().vec()),
        ", v ", list(v.sizes().vec()),
        "; they differ in v's channels at most, and, if grouped, q's heads are a multiple");
  const std::int64_t rows = q.dim() == 4 ? q.size(0) : 1;
  if (lists != 1 && (lists == 0 || static_cast<std::int64_t>(lists) != rows))
    throw InvalidArgument("packed_attention of ", rows, " rows was given lengths of ", lists,
                          "; give one list for each row, or one for all");
  if (!(options.dropout >= 0 && options.dropout <= 1))
    throw InvalidArgument("packed_attention with a dropout of ", options.dropout, "; give 0 to 1");
}

std::string described(const DocumentLengths& lengths, const PackedAttentionOptions& options) {
  std::string text = concat(std::hexfloat, "causal ", options.causal, ", scale ");
  text += options.scale ? concat(std::hexfloat, *options.scale) : "by channels";
  text += concat(std::hexfloat, ", grouped ", options.grouped, ", dropout ", options.dropout);
  // All of them: a difference in any is another mask.
  for (const auto& of_row : lengths) text += concat("\n", list(of_row, of_row.size()));
  return text;
}

// The ranks that compute with the same rows: those with others need not wait for them.
Group sharing_rows(const at::Tensor& t) {
  const ShardSpec of = spec(t);
  return of.mesh().group(axes_where(
      of.placements(), [&](const Placement& p) { return t.dim() != 4 || !p.is_shard(0); }));
}

// Row by row and document by document.
at::Tensor by_documents(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const Documents& documents, const PackedAttentionOptions& options) {
  std::vector<at::Tensor> rows;
  for (std::size_t r = 0; r < documents.size(); ++r) {
    const auto& bounds = documents[r];
    const auto part = [&](const at::Tensor& t, std::int64_t begin, std::int64_t end) {
      const auto row = static_cast<std::int64_t>(r);
      return (documents.size() == 1 ? t : t.narrow(0, row, 1)).narrow(-2, begin, end - begin);
    };
    std::vector<at::Tensor> parts;
    for (std::size_t d = 0; d + 1 < bounds.size(); ++d) {
      const std::int64_t begin = bounds[d], end = bounds[d + 1];
      if (begin == end) continue;
      parts.push_back(at::scaled_dot_product_attention(
          part(q, begin, end), part(k, begin, end), part(v, begin, end), std::nullopt,
          options.dropout, options.causal, options.scale, options.grouped));
    }
    // Zeros, whatever the padding holds, with the history of the others.
    if (bounds.back() < q.size(-2) || parts.empty()) {
      const at::Tensor padding = part(q, bounds.back(), q.size(-2)).narrow(-1, 0, 1);
      auto shape = padding.sizes().vec();
      shape.back() = v.size(-1);
      parts.push_back(
          padding.masked_fill(at::ones_like(padding, padding.options().dtype(at::kBool)), 0)
              .expand(shape));
    }
    rows.push_back(at::cat(parts, -2));
  }
  return documents.size() == 1 ? rows[0] : at::cat(rows, 0);
}

}  // namespace
}  // namespace detail::ring_attention_rules

at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const DocumentLengths& lengths, const PackedAttentionOptions& options) {
  using namespace detail::ring_attention_rules;
  // As autocast does for scaled_dot_product_attention.
  const auto cast = [&](const at::Tensor& t) {
    if (!t.defined() || !at::autocast::is_autocast_enabled(t.device().type())) return t;
    const auto device = t.device().type();
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
  };
  const at::Tensor q = cast(query), k = cast(key), v = cast(value);
  // What goes where follows from them; what is refused below is then refused on every rank.
  for (const at::Tensor* t : {&q, &k, &v}) {
    if (!t->defined() || !is_sharded(*t)) continue;
    agree::same(sharing_rows(*t), "the documents of packed_attention", described(lengths, options));
    break;
  }
  check_packed(q, k, v, lengths.size(), options);
  Documents documents;
  for (const auto& of_row : lengths) documents.push_back(document_bounds(of_row, q.size(-2)));
  const bool plain = !is_sharded(q) && !is_sharded(k) && !is_sharded(v);
  // libtorch's kernels need less memory; how they drop depends on where tensors lie.
  const bool whole = !shards_sequence(q) && !shards_sequence(k) && !shards_sequence(v) &&
                     options.dropout == 0 && documents.size() == 1 &&
                     documents[0].back() == q.size(-2) && q.size(-2) > 0;
  if (plain || whole) return by_documents(q, k, v, documents, options);
  return on_ring(q, k, v, std::nullopt,
                 {"packed_attention", options.dropout, options.causal, options.scale,
                  options.grouped, std::move(documents)});
}

}  // namespace tessera
