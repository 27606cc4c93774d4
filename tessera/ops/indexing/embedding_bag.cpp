// Bags of embeddings, written as an embedding whose rows are added up by bag.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <limits>
#include <tuple>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::embedding_bag_rules {

namespace {

using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

enum Mode : std::int64_t { kSum, kMean, kMax };

std::optional<std::int64_t> wrapped(std::optional<std::int64_t> padding, std::int64_t rows) {
  if (!padding) return padding;
  TORCH_CHECK(*padding >= -rows && *padding < rows, "embedding_bag: padding_idx ", *padding, " of ",
              rows, " rows: it must be from ", -rows, " to ", rows - 1);
  return *padding < 0 ? *padding + rows : *padding;
}

// Number of indices that are in bags: those behind an offset that ends the last bag are in none.
std::int64_t used(const at::Tensor& offsets, std::int64_t count, bool include_last) {
  if (offsets.numel() == 0) return 0;
  const at::Tensor on_host = offsets.to(c10::kCPU, at::kLong).contiguous();
  const std::int64_t* at = on_host.const_data_ptr<std::int64_t>();
  const std::int64_t n = on_host.numel();
  TORCH_CHECK(at[0] == 0, "embedding_bag: offsets[0] is ", at[0],
              ", but the first bag must start at index 0");
  TORCH_CHECK(std::is_sorted(at, at + n), "embedding_bag: offsets must not decrease");
  TORCH_CHECK(at[n - 1] <= count, "embedding_bag: offsets[-1] is ", at[n - 1], ", but there are ",
              count, " indices");
  return include_last ? at[n - 1] : count;
}

// The largest element of each bag; of several that are equal the first gets the gradient, as with
// libtorch's kernel.
at::Tensor greatest(at::Tensor rows, const at::Tensor& bag, const at::Tensor& size,
                    const at::Tensor& none, const at::Tensor& skipped) {
  if (none.size(0) == 0 || rows.size(0) == 0) return none + rows.sum(0);
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  if (skipped.defined()) rows = rows.masked_fill(skipped.unsqueeze(1), kLowest);
  at::Tensor first;
  {
    const at::NoGradGuard no_grad;
    const std::int64_t count = rows.size(0);
    const at::Tensor top = (none + kLowest).index_reduce(0, bag, rows, "amax", true);
    const at::Tensor of_bag = top.index_select(0, bag);
    const at::Tensor position =
        at::arange(count, at::TensorOptions(at::kLong).device(rows.device())).unsqueeze(1);
    const at::Tensor places =
        at::where(rows.eq(of_bag).logical_or(rows.isnan()), position, count - 1);
    first = at::full_like(none, count - 1, none.options().dtype(at::kLong))
                .index_reduce(0, bag, places, "amin", true);
  }
  return at::where(size.eq(0).unsqueeze(1), none, rows.gather(0, first));
}

Four embedding_bag_padded(const at::Tensor& weight, const at::Tensor& given,
                          const at::Tensor& given_offsets, bool scale_grad_by_freq,
                          std::int64_t mode, bool sparse, const std::optional<at::Tensor>& weights,
                          bool include_last, std::optional<std::int64_t> padding) {
  if (sparse)
    throw ShardingError("embedding_bag: gradients of sharded tensors are not sparse: leave it out");
  TORCH_CHECK(given.dim() == 1 && given_offsets.dim() == 1 && weight.dim() == 2,
              "embedding_bag: weight, indices and offsets have ", weight.dim(), ", ", given.dim(),
              " and ", given_offsets.dim(), " dims, and need 2, 1 and 1");
  const auto is_index = [](const at::Tensor& t) {
    return t.scalar_type() == at::kLong || t.scalar_type() == at::kInt;
  };
  if (!at::isFloatingType(weight.scalar_type()) || !is_index(given) || !is_index(given_offsets))
    throw InvalidArgument(concat("embedding_bag of ", c10::toString(weight.scalar_type()), " at ",
                                 c10::toString(given.scalar_type()), " indices and ",
                                 c10::toString(given_offsets.scalar_type()),
                                 " offsets: give floating-point values, and int or long indices"));
  TORCH_CHECK(mode >= kSum && mode <= kMax, "embedding_bag: mode ", mode, " is none of 0 to 2");
  const bool weighted = weights && weights->defined();
  TORCH_CHECK(!weighted || mode == kSum, "embedding_bag: per_sample_weights are for sums");
  TORCH_CHECK(!weighted || weights->numel() == given.numel(), "embedding_bag: there are ",
              weights->numel(), " per_sample_weights for ", given.numel(), " indices");
  const ShardMeta* meta = meta_of(weight)  ? meta_of(weight)
                          : meta_of(given) ? meta_of(given)
                                           : meta_of(given_offsets);
  TORCH_CHECK(meta, "embedding_bag of sharded tensors: of weight, indices and offsets none is");
  const auto context = context_of(meta->spec());
  const auto sharded = [&](const at::Tensor& t) { return meta_of(t) ? t : promote(t, context); };
  padding = wrapped(padding, weight.size(0));
  const at::Tensor offsets = meta_of(given_offsets) ? full_tensor(given_offsets) : given_offsets;
  const std::int64_t bags = offsets.size(0) - (include_last ? 1 : 0);
  TORCH_CHECK(bags >= 0, "embedding_bag: include_last_offset without offsets");
  const std::int64_t count = used(offsets, given.size(0), include_last);
  // The bag of each index; there is none for empty bags.
  const at::Tensor bag_of =
      at::bucketize(at::arange(count, offsets.options()), offsets.narrow(0, 0, bags), false, true) -
      1;
  const at::Tensor indices = sharded(given).narrow(0, 0, count), bag = sharded(bag_of);
  const at::Tensor skipped = padding ? indices.eq(*padding) : at::Tensor();
  const at::Tensor counts = padding ? skipped.logical_not().to(at::kLong)
                                    : at::ones_like(indices, indices.options().dtype(at::kLong));
  at::Tensor rows =
      at::embedding(sharded(weight), indices, padding.value_or(-1), scale_grad_by_freq);
  if (weighted) rows = rows * sharded(*weights).narrow(0, 0, count).unsqueeze(1);
  const at::Tensor size =
      sharded(at::zeros({bags}, offsets.options().dtype(at::kLong))).index_add(0, bag, counts);
  // Sums of half precision are computed in float32.
  const auto type = rows.scalar_type(), wide = at::toOpMathType(type);
  const at::Tensor none = sharded(
      at::zeros({bags, weight.size(1)}, offsets.options().dtype(mode == kMax ? type : wide)));
  at::Tensor result;
  if (mode == kMax) {
    result = greatest(rows, bag, size, none, skipped);
  } else {
    if (padding) rows = rows.masked_fill(skipped.unsqueeze(1), 0);
    result = none.index_add(0, bag, rows.to(wide));
    if (mode == kMean) result = result / size.clamp_min(1).unsqueeze(1);
  }
  return {result.to(type), bag, size.to(offsets.scalar_type()),
          at::zeros_like(size, size.options().dtype(offsets.scalar_type()))};
}

Four embedding_bag(const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                   bool scale_grad_by_freq, std::int64_t mode, bool sparse,
                   const std::optional<at::Tensor>& weights, bool include_last) {
  return embedding_bag_padded(weight, indices, offsets, scale_grad_by_freq, mode, sparse, weights,
                              include_last, std::nullopt);
}

const AtStart registered([] {
  register_decomposition("embedding_bag", embedding_bag);
  register_decomposition("embedding_bag.padding_idx", embedding_bag_padded);
});

}  // namespace

}  // namespace tessera::detail::embedding_bag_rules
