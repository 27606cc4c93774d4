// Attention over complete sequences: samples and heads may be sharded. Sequences that are sharded
// are handled by ring_attention.cpp.

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
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

namespace tessera::detail::scaled_dot_product_rules {
namespace {

enum : int { kBatch, kHead };

// Queries in groups that share a head of keys, where each rank has whole groups: dim 1 of queries
// is sharded as that of keys, in as many times the heads. Nothing, where they are sharded
// otherwise.
std::optional<Plan> grouped(const OpCall& call, const ShardSpec& q, const ShardSpec& k,
                            const ShardSpec& v) {
  const std::int64_t each = k.shape()[1] > 0 ? q.shape()[1] / k.shape()[1] : 0;
  if (each < 2 || call.find("attn_mask") || q.dim(1).axes.empty()) return std::nullopt;
  for (const ShardSpec* other : {&k, &v})
    if (!(other->placements() == q.placements()) || !(other->dim(0) == q.dim(0)) ||
        !(other->dim(1) == k.dim(1)))
      return std::nullopt;
  for (const Placement& p : q.placements())
    if (p.is_partial() || (p.is_shard() && p.dim > 1)) return std::nullopt;
  for (int r = 0; r < k.dim(1).partition.parts(); ++r)
    if (q.dim(1).partition.size(r) != each * k.dim(1).partition.size(r)) return std::nullopt;
  const auto like = [](const ShardSpec& lies, const Shape& shape) {
    std::vector<int> from(shape.size(), -1);
    from[0] = 0;
    from[1] = 1;
    return mapped_spec(lies, shape, from, false);
  };
  Plan plan;
  for (const TensorInfo& t : call.tensors()) {
    const bool keys = &t == call.find("key") || &t == call.find("value");
    plan.inputs.emplace_back(like(keys ? k : q, t.spec.shape()));
  }
  Shape out = q.shape();
  out[3] = v.shape()[3];
  if (call.find("grad_out"))
    plan.outputs = {{like(q, q.shape())}, {like(k, k.shape())}, {like(k, v.shape())}};
  else
    plan.outputs = {{like(q, out)}, {like(q, {out[0], out[1], out[2]})}};
  return plan;
}

Plan solved(const OpCall& call) {
  const TensorInfo& q = *call.find("query");
  if (q.spec.dims() != 4) throw ShardingError(call.name(), " of ", q.spec, " has no rule");
  const Labels heads{kBatch, kHead, kUnsharded, kUnsharded};
  LabelProblem p(call);
  const auto& k = *call.find("key");
  // Groups of queries that share a head of keys must stay together: then only samples may be
  // sharded.
  const Labels one = k.spec.shape()[1] == q.spec.shape()[1]
                         ? heads
                         : Labels{kBatch, kUnsharded, kUnsharded, kUnsharded};
  label_arguments(p, {{"query", one},
                      {"key", one},
                      {"value", one},
                      {"grad_out", one},
                      {"out", one},
                      {"logsumexp", {one[0], one[1], kUnsharded}}});
  if (const TensorInfo* mask = call.find("attn_mask"); mask && mask->spec.dims() == 4) {
    Labels& labels = p.inputs[call.index_of(*mask)];
    if (mask->spec.shape()[0] == q.spec.shape()[0] && q.spec.shape()[0] > 1) labels[0] = kBatch;
    if (mask->spec.shape()[1] == q.spec.shape()[1] && q.spec.shape()[1] > 1) labels[1] = one[1];
  }
  const auto& v = *call.find("value");
  Shape out = q.spec.shape();
  out[3] = v.spec.shape()[3];
  if (call.find("grad_out")) {
    p.outputs = {one, one, one};
    p.output_shapes = {q.spec.shape(), k.spec.shape(), v.spec.shape()};
  } else {
    p.outputs = {one, {one[0], one[1], kUnsharded}};
    p.output_shapes = {out, {out[0], out[1], out[2]}};
  }
  return solve(p);
}

Plan attention(const OpCall& call) {
  if (call.argument("grad_out") >= 0 && !call.find("grad_out")) {
    // Backward without a gradient: none of the inputs gets one.
    return {.outputs = std::vector<Plan::Output>(3),
            .local = [](const OperatorHandle&, const Stack&) { return Stack(3, at::Tensor()); }};
  }
  const auto spec_of = [&](const char* name) { return call.find(name)->spec; };
  std::optional<Plan> of_groups;
  if (spec_of("query").dims() == 4 && spec_of("key").dims() == 4 && spec_of("value").dims() == 4)
    of_groups = grouped(call, spec_of("query"), spec_of("key"), spec_of("value"));
  Plan plan = of_groups ? std::move(*of_groups) : solved(call);
  if (plan.outputs[0].spec.local_numel() == 0) {
    // Kernels divide by the number of heads.
    const auto own = +[](const Stack& a) { return a[0].toTensor().scalar_type(); };
    const auto wide =
        +[](const Stack& a) { return at::toOpMathType(a[0].toTensor().scalar_type()); };
    plan.local = zeros_of(plan, call.find("grad_out") ? own : wide);
  }
  return plan;
}

// Which kernel computes attention is chosen alike on all ranks, from global shapes and libtorch's
// switch of the process alone: 1 is flash, 0 the composite of products and softmax, which can be
// differentiated twice.
Plan attention_choice(const OpCall& call) {
  const TensorInfo& q = *call.find("query");
  const auto last_is_dense = [&](const char* name) { return call.find(name)->strides.back() == 1; };
  const TensorInfo &k = *call.find("key"), &v = *call.find("value");
  if (q.dtype != k.dtype || q.dtype != v.dtype)
    throw InvalidArgument("attention of a query of ", toString(q.dtype), ", keys of ",
                          toString(k.dtype), " and values of ", toString(v.dtype),
                          ": convert them to one type");
  const auto length = [](const TensorInfo& t) {
    return t.spec.dims() < 2 ? 0 : *(t.spec.shape().end() - 2);
  };
  if (length(k) != length(v))
    throw InvalidArgument("attention of ", length(k), " keys and ", length(v),
                          " values: one for each");
  const bool flash = q.spec.dims() == 4 && call.number("dropout_p") == 0 &&
                     last_is_dense("query") && last_is_dense("key") && last_is_dense("value") &&
                     !call.has("attn_mask") && q.spec.shape()[1] == k.spec.shape()[1] &&
                     q.spec.shape()[3] == call.find("value")->spec.shape()[3] &&
                     q.spec.numel() > 0 && k.spec.numel() > 0 && at::isFloatingType(q.dtype);
  // The plan is kept, the switch may change.
  return {.local = [flash](const OperatorHandle&, Stack) {
    const bool chosen = flash && at::globalContext().userEnabledFlashSDP();
    return Stack{static_cast<std::int64_t>(chosen ? 1 : 0)};
  }};
}

// ----
// The fused layers that Python's nn.MultiheadAttention and nn.TransformerEncoderLayer run if no
// gradient is needed, written as the operators that they fuse.

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
    throw InvalidArgument("_native_multi_head_attention of ", query.sizes(), " with ", num_head,
                          " heads of ", embed_dim, " channels");
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
  register_rules({"aten::_scaled_dot_product_flash_attention_for_cpu",
                  "aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
                 guarded(attention), {.for_replicated = true});
  register_rule("aten::_fused_sdp_choice", attention_choice, {.for_replicated = true});
  register_decomposition("_native_multi_head_attention", multi_head_attention);
  register_decomposition("_transformer_encoder_layer_fwd", encoder_layer);
  // No: nn.TransformerEncoder continues with the mask instead of nested tensors.
  register_decomposition("_nested_tensor_from_mask_left_aligned",
                         [](const at::Tensor&, const at::Tensor&) { return false; });
});

}  // namespace
}  // namespace tessera::detail::scaled_dot_product_rules
