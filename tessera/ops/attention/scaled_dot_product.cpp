// Attention over complete sequences: samples and heads may be sharded. Sequences that are sharded
// are handled by ring_attention.cpp.

#include <ATen/Context.h>
#include <ATen/OpMathType.h>

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
  for (const ShardSpec* other : {&k, &v}) {
    if (!(other->placements() == q.placements()) || !(other->dim(0) == q.dim(0)) ||
        !(other->dim(1) == k.dim(1)))
      return std::nullopt;
  }
  for (const Placement& p : q.placements()) {
    if (p.is_partial() || (p.is_shard() && p.dim > 1)) return std::nullopt;
  }
  for (int r = 0; r < k.dim(1).partition.parts(); ++r) {
    if (q.dim(1).partition.size(r) != each * k.dim(1).partition.size(r)) return std::nullopt;
  }
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
  if (call.find("grad_out")) {
    plan.outputs = {{like(q, q.shape())}, {like(k, k.shape())}, {like(k, v.shape())}};
  } else {
    plan.outputs = {{like(q, out)}, {like(q, {out[0], out[1], out[2]})}};
  }
  return plan;
}

Plan solved(const OpCall& call) {
  const TensorInfo& q = *call.find("query");
  if (q.spec.dims() != 4) throw ShardingError(concat(call.name(), " of ", q.spec, " has no rule"));
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
    Plan none;
    none.outputs.resize(3);
    none.local = [](const OperatorHandle&, const Stack&) { return Stack(3, at::Tensor()); };
    return none;
  }
  const auto spec_of = [&](const char* name) { return call.find(name)->spec; };
  std::optional<Plan> of_groups;
  if (spec_of("query").dims() == 4 && spec_of("key").dims() == 4 && spec_of("value").dims() == 4)
    of_groups = grouped(call, spec_of("query"), spec_of("key"), spec_of("value"));
  Plan plan = of_groups ? std::move(*of_groups) : solved(call);
  if (plan.outputs[0].spec.local_numel() == 0) {
    // Kernels divide by the number of heads.
    std::vector<Shape> shapes;
    for (const auto& o : plan.outputs) shapes.push_back(o.spec.local_shape());
    plan.local = [shapes](const OperatorHandle&, Stack arguments) {
      Stack made;
      for (const Shape& shape : shapes) {
        const at::Tensor& t = arguments[0].toTensor();
        made.emplace_back(t.new_zeros(
            shape, shape.size() == 3 ? t.options().dtype(at::toOpMathType(t.scalar_type()))
                                     : t.options()));
      }
      return made;
    };
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
    throw InvalidArgument(concat("attention of a query of ", toString(q.dtype), ", keys of ",
                                 toString(k.dtype), " and values of ", toString(v.dtype),
                                 ": convert them to one type"));
  const auto length = [](const TensorInfo& t) {
    return t.spec.dims() < 2 ? 0 : *(t.spec.shape().end() - 2);
  };
  if (length(k) != length(v))
    throw InvalidArgument(
        concat("attention of ", length(k), " keys and ", length(v), " values: one for each"));
  const bool flash = q.spec.dims() == 4 && call.number("dropout_p") == 0 &&
                     last_is_dense("query") && last_is_dense("key") && last_is_dense("value") &&
                     !call.has("attn_mask") && q.spec.shape()[1] == k.spec.shape()[1] &&
                     q.spec.shape()[3] == call.find("value")->spec.shape()[3] &&
                     q.spec.numel() > 0 && k.spec.numel() > 0 && at::isFloatingType(q.dtype);
  Plan plan;
  // The plan is kept, the switch may change.
  plan.local = [flash](const OperatorHandle&, Stack) {
    const bool chosen = flash && at::globalContext().userEnabledFlashSDP();
    return Stack{static_cast<std::int64_t>(chosen ? 1 : 0)};
  };
  return plan;
}

const AtStart registered([] {
  register_rules({"aten::_scaled_dot_product_flash_attention_for_cpu",
                  "aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
                 guarded(attention), {.for_replicated = true});
  register_rule("aten::_fused_sdp_choice", attention_choice, {.for_replicated = true});
});

}  // namespace

}  // namespace tessera::detail::scaled_dot_product_rules
