// Layers and losses: norms over whole dims, embeddings, losses weighted
// by true counts, attention over samples and heads.

#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/ops/rules/empty_parts.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

namespace {

using Shape = std::vector<std::int64_t>;

Labels first_free(int n, int free) {
  Labels labels = all_labels(n);
  for (int d = free; d < n; ++d) labels[d] = kWhole;
  return labels;
}

Labels whole(const TensorInfo& t) { return Labels(t.spec.dims(), kWhole); }

// Every input by its name; those not named are whole.
void describe(LabelProblem& p, const std::vector<std::pair<const char*, Labels>>& named) {
  for (const TensorInfo& t : p.call.tensors()) {
    Labels labels = whole(t);
    for (const auto& [name, given] : named) {
      if (p.call.find(name) == &t && static_cast<int>(given.size()) == t.spec.dims())
        labels = given;
    }
    p.inputs.push_back(std::move(labels));
  }
}

std::set<int> some(int n) {
  std::set<int> all;
  for (int i = 0; i < n; ++i) all.insert(i);
  return all;
}

Plan layer_norm(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims(),
            free = n - static_cast<int>(call.integers("normalized_shape").size());
  LabelProblem p(call);
  describe(p, {{"input", first_free(n, free)}});
  p.outputs.assign(3, first_free(n, free));
  Shape statistics = x.spec.shape();
  std::fill(statistics.begin() + free, statistics.end(), 1);
  if (!call.outputs()) p.output_shapes = {x.spec.shape(), statistics, statistics};
  Plan plan = solve(p);
  if (plan.inputs[0]->local_numel() == 0) {
    // Kernels disagree on the shape of the statistics of nothing.
    plan.local = [a = plan.outputs[0].spec.local_shape(), b = plan.outputs[1].spec.local_shape()](
                     const c10::OperatorHandle&, torch::jit::Stack arguments) {
      const at::Tensor& t = arguments[0].toTensor();
      return torch::jit::Stack{t.new_empty(a), t.new_empty(b), t.new_empty(b)};
    };
  }
  return plan;
}

Plan layer_norm_backward(const OpCall& call) {
  const TensorInfo& x = *call.find("input");
  const int n = x.spec.dims(),
            free = n - static_cast<int>(call.integers("normalized_shape").size());
  const Labels rows = first_free(n, free);
  LabelProblem p(call);
  describe(p, {{"grad_out", rows}, {"input", rows}, {"mean", rows}, {"rstd", rows}});
  const Shape shape = call.integers("normalized_shape");
  p.outputs = {rows, Labels(n - free, kWhole), Labels(n - free, kWhole)};
  p.output_shapes = {x.spec.shape(), shape, shape};
  p.contract = some(free);
  Plan plan = solve(p);
  plan.outputs[0].strides = contiguous_strides(x.spec.shape());
  if (plan.inputs[call.index_of(x)]->local_numel() == 0) {
    plan.local = [rows_shape = plan.outputs[0].spec.local_shape(), shape](
                     const c10::OperatorHandle&, torch::jit::Stack arguments) {
      const at::Tensor& t = arguments[1].toTensor();
      return torch::jit::Stack{t.new_empty(rows_shape), t.new_zeros(shape), t.new_zeros(shape)};
    };
  }
  return plan;
}

// Samples are free; channels, groups and what is inside are whole. The counts among the arguments
// are the local ones.
Plan group_norm(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  LabelProblem p(call);
  describe(p, {{"input", first_free(n, 1)}});
  p.outputs = {first_free(n, 1), first_free(2, 1), first_free(2, 1)};
  const Shape statistics{x.spec.shape()[0], call.integer("group")};
  p.output_shapes = {x.spec.shape(), statistics, statistics};
  Plan plan = solve(p);
  plan.arguments = {{call.argument("N"), plan.inputs[0]->local_shape()[0]}};
  return plan;
}

Plan group_norm_backward(const OpCall& call) {
  const TensorInfo& x = *call.find("input");
  const int n = x.spec.dims();
  LabelProblem p(call);
  describe(p, {{"grad_out", first_free(n, 1)},
               {"input", first_free(n, 1)},
               {"mean", first_free(2, 1)},
               {"rstd", first_free(2, 1)}});
  const Shape channels{call.integer("C")};
  p.outputs = {first_free(n, 1), {kWhole}, {kWhole}};
  p.output_shapes = {x.spec.shape(), channels, channels};
  p.contract = {0};
  Plan plan = solve(p);
  plan.arguments = {{call.argument("N"), plan.inputs[0]->local_shape()[0]}};
  return plan;
}

Plan embedding_backward(const OpCall& call) {
  const TensorInfo& indices = *call.find("indices");
  const TensorInfo& g = *call.find("grad_output");
  const int n = indices.spec.dims();
  LabelProblem p(call);
  describe(p, {{"grad_output", all_labels(n + 1)}, {"indices", all_labels(n)}});
  p.outputs = {{kWhole, n}};
  p.output_shapes = {{call.integer("num_weights"), g.spec.shape()[n]}};
  p.contract = some(n);
  // the frequency is that of the whole batch
  if (call.argument("scale_grad_by_freq") >= 0 && call.boolean("scale_grad_by_freq"))
    p.contract.clear();
  return solve(p);
}

// ---- losses ----

// Elementwise losses with a reduction: a mean is a sum over the global count.
Plan divided(Plan plan, const OpCall& call, double count) {
  plan.arguments = {{call.argument("reduction"), static_cast<std::int64_t>(at::Reduction::Sum)}};
  plan.local = [count](const c10::OperatorHandle& op, torch::jit::Stack arguments) {
    op.callBoxed(arguments);
    arguments[0] = arguments[0].toTensor().div(count);
    return arguments;
  };
  return plan;
}

Plan loss(const OpCall& call) {
  LabelProblem p(call);
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  const std::int64_t reduction = call.integer("reduction");
  for (const TensorInfo& t : call.tensors()) {
    if (t.spec.shape() != shape)
      throw ShardingError(
          concat(call.name(),
                 " of sharded tensors of different shapes has no rule: expand the target first"));
    p.inputs.push_back(all_labels(n));
  }
  p.outputs = {reduction == at::Reduction::None ? all_labels(n) : Labels{}};
  p.output_shapes = {reduction == at::Reduction::None ? shape : Shape{}};
  p.contract = some(n);
  Plan plan = solve(p);
  return reduction == at::Reduction::Mean
             ? divided(std::move(plan), call, static_cast<double>(call.tensor(0).spec.numel()))
             : plan;
}

Plan loss_backward(const OpCall& call) {
  LabelProblem p(call);
  const TensorInfo& x = *call.find("self");
  const int n = x.spec.dims();
  const std::int64_t reduction = call.integer("reduction");
  for (const TensorInfo& t : call.tensors()) {
    p.inputs.push_back(t.spec.shape() == x.spec.shape() ? all_labels(n) : whole(t));
  }
  p.outputs = {all_labels(n)};
  p.output_shapes = {x.spec.shape()};
  Plan plan = solve(p);
  plan.outputs[0].strides = x.strides;
  return reduction == at::Reduction::Mean
             ? divided(std::move(plan), call, static_cast<double>(x.spec.numel()))
             : plan;
}

// ---- attention: samples and heads are free ----

enum : int { kBatch, kHead };

Plan attention(const OpCall& call) {
  const TensorInfo& q = *call.find("query");
  if (q.spec.dims() != 4) throw ShardingError(concat(call.name(), " of ", q.spec, " has no rule"));
  const Labels heads{kBatch, kHead, kWhole, kWhole};
  LabelProblem p(call);
  const auto& k = *call.find("key");
  // Groups of queries that share a head of keys may not be torn apart: then only samples are free.
  const Labels one =
      k.spec.shape()[1] == q.spec.shape()[1] ? heads : Labels{kBatch, kWhole, kWhole, kWhole};
  describe(p, {{"query", one},
               {"key", one},
               {"value", one},
               {"grad_out", one},
               {"out", one},
               {"logsumexp", {one[0], one[1], kWhole}}});
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
    p.outputs = {one, {one[0], one[1], kWhole}};
    p.output_shapes = {out, {out[0], out[1], out[2]}};
  }
  Plan plan = solve(p);
  if (plan.outputs[0].spec.local_numel() == 0) {
    // Kernels divide by the number of heads.
    std::vector<Shape> shapes;
    for (const auto& o : plan.outputs) shapes.push_back(o.spec.local_shape());
    plan.local = [shapes](const c10::OperatorHandle&, torch::jit::Stack arguments) {
      torch::jit::Stack made;
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

// Which kernel computes attention is decided alike on all ranks, from global shapes alone: 1 is
// flash, 0 the composite of products and softmax.
Plan attention_choice(const OpCall& call) {
  const TensorInfo& q = *call.find("query");
  const auto last_is_dense = [&](const char* name) { return call.find(name)->strides.back() == 1; };
  const auto& k = *call.find("key");
  const bool flash = q.spec.dims() == 4 && call.number("dropout_p") == 0 &&
                     last_is_dense("query") && last_is_dense("key") && last_is_dense("value") &&
                     !call.has("attn_mask") && q.spec.shape()[1] == k.spec.shape()[1] &&
                     q.spec.shape()[3] == call.find("value")->spec.shape()[3] &&
                     q.spec.numel() > 0 && k.spec.numel() > 0 && at::isFloatingType(q.dtype);
  Plan plan;
  plan.local = [flash](const c10::OperatorHandle&, torch::jit::Stack) {
    return torch::jit::Stack{static_cast<std::int64_t>(flash ? 1 : 0)};
  };
  return plan;
}

const bool network_registered = [] {
  register_rule("aten::native_layer_norm", layer_norm);
  register_rule("aten::native_layer_norm_backward", layer_norm_backward);
  register_rule("aten::native_group_norm", guarded(group_norm));
  register_rule("aten::native_group_norm_backward", guarded(group_norm_backward));
  register_rule("aten::embedding_dense_backward", embedding_backward);
  for (const char* op :
       {"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy",
        "aten::binary_cross_entropy_with_logits", "aten::soft_margin_loss"}) {
    register_rule(op, loss);
    register_rule(std::string(op) + "_backward", loss_backward);
  }
  for (const char* op : {"aten::_scaled_dot_product_flash_attention_for_cpu",
                         "aten::_scaled_dot_product_flash_attention_for_cpu_backward"})
    register_rule(op, guarded(attention));
  register_rule("aten::_fused_sdp_choice", attention_choice);
  return true;
}();

}  // namespace

}  // namespace tessera::detail
