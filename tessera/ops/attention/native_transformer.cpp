// The fused layers that Python's nn.MultiheadAttention and nn.TransformerEncoderLayer run if no
// gradient is needed, written as the operators that they fuse.

#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::native_transformer_rules {

namespace {

using Mask = std::optional<at::Tensor>;

// Which keys are masked, as [samples, heads, queries, keys] or a shape that broadcasts to it. Like
// the fused kernels: `type` 0 is a mask of queries and keys, 1 one of the keys of each sample, 2
// one of everything; numbers count as true unless they are zero.
at::Tensor forbidden(const at::Tensor& mask, std::optional<std::int64_t> type) {
  const at::Tensor m = mask.to(at::kBool);
  switch (type.value_or(2)) {
    case 0:
      return m.view({1, 1, m.size(0), m.size(1)});
    case 1:
      return m.view({m.size(0), 1, 1, m.size(1)});
    default:
      return m.dim() == 3 ? m.unsqueeze(1) : m;
  }
}

std::vector<at::Tensor> projected(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const at::Tensor& weight,
                                  const at::Tensor& bias) {
  if (key.is_same(query) && value.is_same(query))
    return at::linear(query, weight, bias).chunk(3, -1);
  const auto weights = weight.chunk(3, 0), biases = bias.chunk(3, 0);
  return {at::linear(query, weights[0], biases[0]), at::linear(key, weights[1], biases[1]),
          at::linear(value, weights[2], biases[2])};
}

std::tuple<at::Tensor, at::Tensor> multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, std::int64_t embed_dim,
    std::int64_t num_head, const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight, const at::Tensor& proj_bias, const Mask& mask, bool need_weights,
    bool average_weights, std::optional<std::int64_t> mask_type) {
  if (query.dim() != 3 || num_head <= 0 || embed_dim % num_head != 0)
    throw InvalidArgument(concat("_native_multi_head_attention of ", query.sizes(), " with ",
                                 num_head, " heads of ", embed_dim, " channels"));
  auto all = projected(query, key, value, qkv_weight, qkv_bias);
  for (at::Tensor& t : all)
    t = t.view({t.size(0), t.size(1), num_head, embed_dim / num_head}).transpose(1, 2);
  const Mask not_these = mask ? Mask(forbidden(*mask, mask_type)) : std::nullopt;
  at::Tensor made, weights;
  if (need_weights) {
    const double scale =
        1 / std::sqrt(static_cast<double>(embed_dim) / static_cast<double>(num_head));
    at::Tensor scores = at::matmul(all[0] * scale, all[1].transpose(2, 3));
    if (not_these)
      scores = scores.masked_fill(*not_these, -std::numeric_limits<double>::infinity());
    weights = scores.softmax(-1);
    made = at::matmul(weights, all[2]);
    if (average_weights) weights = weights.mean(1);
  } else {
    made = at::scaled_dot_product_attention(
        all[0], all[1], all[2], not_these ? Mask(not_these->logical_not()) : std::nullopt);
  }
  made = made.transpose(1, 2).reshape({query.size(0), query.size(1), embed_dim});
  return {at::linear(made, proj_weight, proj_bias), weights};
}

at::Tensor encoder_layer(const at::Tensor& src, std::int64_t embed_dim, std::int64_t num_heads,
                         const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
                         const at::Tensor& proj_weight, const at::Tensor& proj_bias, bool use_gelu,
                         bool norm_first, double eps, const at::Tensor& norm_weight_1,
                         const at::Tensor& norm_bias_1, const at::Tensor& norm_weight_2,
                         const at::Tensor& norm_bias_2, const at::Tensor& ffn_weight_1,
                         const at::Tensor& ffn_bias_1, const at::Tensor& ffn_weight_2,
                         const at::Tensor& ffn_bias_2, const Mask& mask,
                         std::optional<std::int64_t> mask_type) {
  const auto attended = [&](const at::Tensor& x) {
    return std::get<0>(multi_head_attention(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias,
                                            proj_weight, proj_bias, mask, false, true, mask_type));
  };
  const auto fed = [&](const at::Tensor& x) {
    const at::Tensor inner = at::linear(x, ffn_weight_1, ffn_bias_1);
    return at::linear(use_gelu ? at::gelu(inner) : at::relu(inner), ffn_weight_2, ffn_bias_2);
  };
  const auto first = [&](const at::Tensor& x) {
    return at::layer_norm(x, {embed_dim}, norm_weight_1, norm_bias_1, eps);
  };
  const auto second = [&](const at::Tensor& x) {
    return at::layer_norm(x, {embed_dim}, norm_weight_2, norm_bias_2, eps);
  };
  if (norm_first) {
    const at::Tensor x = src + attended(first(src));
    return x + fed(second(x));
  }
  const at::Tensor x = first(src + attended(src));
  return second(x + fed(x));
}

const AtStart registered([] {
  register_decomposition("_native_multi_head_attention", multi_head_attention);
  register_decomposition("_transformer_encoder_layer_fwd", encoder_layer);
  // No: nn.TransformerEncoder continues with the mask instead of nested tensors.
  register_decomposition("_nested_tensor_from_mask_left_aligned",
                         [](const at::Tensor&, const at::Tensor&) { return false; });
});

}  // namespace

}  // namespace tessera::detail::native_transformer_rules
