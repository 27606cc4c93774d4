// Bags of embeddings, written as an embedding whose rows are added up by bag.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <limits>
#include <optional>
#include <tuple>

#include "tessera/ops/rules/decomposition.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::embedding_bag_rules {

namespace {

using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

enum Mode : std::int64_t { kSum, kMean, kMax };

Four embedding_bag_padded(const at::Tensor& weight, const at::Tensor& given,
                          const at::Tensor& given_offsets, bool scale_grad_by_freq,
                          std::int64_t mode, bool sparse, const std::optional<at::Tensor>& weights,
                          bool include_last, std::optional<std::int64_t> padding) {
  TORCH_CHECK(!sparse, "embedding_bag: sparse gradients of sharded tensors: leave out sparse");
  TORCH_CHECK(given.dim() == 1 && given_offsets.dim() == 1 && weight.dim() == 2,
              "embedding_bag: weight, indices and offsets have ", weight.dim(), ", ", given.dim(),
              " and ", given_offsets.dim(), " dims, and need 2, 1 and 1");
  TORCH_CHECK(mode >= kSum && mode <= kMax, "embedding_bag: mode ", mode, " is none of 0 to 2");
  const bool weighted = weights && weights->defined();
  TORCH_CHECK(!weighted || mode == kSum, "embedding_bag: per_sample_weights are for sums");
  const ShardMeta* meta = meta_of(weight)  ? meta_of(weight)
                          : meta_of(given) ? meta_of(given)
                                           : meta_of(given_offsets);
  TORCH_CHECK(meta, "embedding_bag of sharded tensors: of weight, indices and offsets none is");
  const auto context = context_of(meta->spec());
  const auto sharded = [&](const at::Tensor& t) { return meta_of(t) ? t : promote(t, context); };
  at::Tensor offsets = meta_of(given_offsets) ? full_tensor(given_offsets) : given_offsets;
  const std::int64_t bags = offsets.size(0) - (include_last ? 1 : 0), count = given.size(0);
  TORCH_CHECK(bags >= 0, "embedding_bag: include_last_offset without offsets");
  // Where each index belongs; those of empty bags are nowhere.
  const at::Tensor bag_of =
      at::bucketize(at::arange(count, offsets.options()), offsets.narrow(0, 0, bags), false, true) -
      1;
  const at::Tensor indices = sharded(given), bag = sharded(bag_of);
  const at::Tensor counts =
      padding ? indices.ne(*padding).to(weight.scalar_type())
              : at::ones_like(indices, indices.options().dtype(weight.scalar_type()));
  at::Tensor rows =
      at::embedding(sharded(weight), indices, padding.value_or(-1), scale_grad_by_freq);
  if (weighted) rows = rows * sharded(*weights).unsqueeze(1);
  const at::Tensor size = sharded(at::zeros({bags}, offsets.options().dtype(weight.scalar_type())))
                              .index_add(0, bag, counts);
  const at::Tensor none =
      sharded(at::zeros({bags, weight.size(1)}, offsets.options().dtype(weight.scalar_type())));
  at::Tensor result;
  if (mode == kMax) {
    constexpr double kLowest = -std::numeric_limits<double>::infinity();
    if (padding) rows = rows.masked_fill(indices.eq(*padding).unsqueeze(1), kLowest);
    const at::Tensor top = (none + kLowest).index_reduce(0, bag, rows, "amax", true);
    result = at::where(size.eq(0).unsqueeze(1), none, top);
  } else {
    if (padding) rows = rows * counts.unsqueeze(1);
    result = none.index_add(0, bag, rows);
    if (mode == kMean) result = result / size.clamp_min(1).unsqueeze(1);
  }
  return {result, bag, size.to(offsets.scalar_type()), at::zeros_like(size)};
}

Four embedding_bag(const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                   bool scale_grad_by_freq, std::int64_t mode, bool sparse,
                   const std::optional<at::Tensor>& weights, bool include_last) {
  return embedding_bag_padded(weight, indices, offsets, scale_grad_by_freq, mode, sparse, weights,
                              include_last, std::nullopt);
}

const bool registered = [] {
  register_decomposition("embedding_bag", embedding_bag);
  register_decomposition("embedding_bag.padding_idx", embedding_bag_padded);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::embedding_bag_rules
