// Batch normalization over uneven shards: every rank's sums are added, then divided by the global
// count, so that the result is what one process computes. Two passes (mean first), numerically
// stable like libtorch's own kernels.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "tessera/ops/norms/detail/dtypes.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::batch_norm_rules {
namespace {

// Everything but channels (dim 1) is summed over.
struct BatchNorm {
  LabelProblem problem;
  const TensorInfo& x;
  int dims;
  double count = 1;

  explicit BatchNorm(const OpCall& call) : problem(call), x(*call.find("input")) {
    dims = x.spec.dims();
    if (dims < 2)
      throw InvalidArgument(call.name(), " of an input of shape ", list(x.spec.shape()),
                            ": it needs samples and channels");
    const Labels data = all_labels(dims);
    // A forward without training saves empty statistics.
    for (const TensorInfo& t : call.tensors())
      problem.inputs.push_back(
          t.spec.dims() > 1
              ? data
              : Labels(t.spec.dims(), t.spec.numel() == x.spec.shape()[1] ? 1 : kUnsharded));
    problem.outputs = {data, {1}, {1}};
    const Shape of_channels{x.spec.shape()[1]};
    problem.output_shapes = {x.spec.shape(), of_channels, of_channels};
    for (int d = 0; d < dims; ++d) {
      if (d == 1) continue;
      problem.contract.insert(d);
      count *= static_cast<double>(x.spec.shape()[d]);
    }
  }

  // Strides of the result, which libtorch makes row-major or channels_last.
  Shape strides() const {
    const Shape& shape = x.spec.shape();
    return dims > 3 && is_channels_last(shape, x.strides) ? channels_last(shape)
                                                          : contiguous_strides(shape);
  }
  Shape reduced() const { return Shape(problem.contract.begin(), problem.contract.end()); }
};

// libtorch's kernels divide by the number of channels or samples. If a rank has none there is
// nothing to compute.
bool nothing_here(const Plan& plan, const OpCall& call) {
  for (const TensorInfo& t : call.tensors())
    if (t.spec.shape() == call.find("input")->spec.shape() &&
        plan.inputs[call.index_of(t)]->local_numel() == 0)
      return true;
  return false;
}

// The dtype of the gradients of weight and bias.
at::ScalarType of_gradients(const Stack& a) {
  const at::Tensor weight = optional_tensor(a[2]);
  return (weight.defined() ? weight : a[1].toTensor()).scalar_type();
}

// Updates running statistics in place: the statistics of a step, which are sharded like the
// channels, are redistributed to them.
struct Running {
  ShardSpec step;  // of the statistics computed in a step
  std::optional<ShardSpec> mean, var;

  Running(const OpCall& call, Plan& plan) : step(plan.outputs[1].spec) {
    const auto keep = [&](const char* name, std::optional<ShardSpec>& spec) {
      const TensorInfo* t = call.find(name);
      if (!t) return;
      if (t->spec.has_partial())
        throw ShardingError(call.name(), " would update ", name, ", which is partial: ", t->spec,
                            ". Redistribute it.");
      spec = t->spec;
      plan.inputs[call.index_of(*t)] = t->spec;
    };
    keep("running_mean", mean);
    keep("running_var", var);
  }
  bool in_place() const { return (!mean || *mean == step) && (!var || *var == step); }
  void update(const at::Tensor& running, const std::optional<ShardSpec>& spec,
              const at::Tensor& value, double momentum, double factor) const {
    if (!spec) return;
    const at::Tensor mine = redistribute_local(value, step, *spec);
    running.mul_(1 - momentum).add_(mine.to(running.scalar_type()), momentum * factor);
  }
};

Plan batch_norm(const OpCall& call) {
  if (optional_tensor(call.value("running_mean")).defined() !=
      optional_tensor(call.value("running_var")).defined())
    throw InvalidArgument(call.name(),
                          ": running_mean and running_var are given together, or none");
  BatchNorm b(call);
  Plan plan = solve(b.problem);
  plan.outputs[0].strides = b.strides();
  if (!call.boolean("training")) {
    // Sample by sample; the statistics that are returned are empty, like libtorch's.
    const ShardSpec none = mapped_spec(call.tensor(0).spec, {0}, {-1}, false);
    plan.outputs[1] = plan.outputs[2] = {none, Shape{1}};
    if (nothing_here(plan, call)) plan.local = zeros_of(plan, wide_statistics_dtype);
    return plan;
  }
  const std::vector<int> axes = reduce_inside(plan.outputs[1]);
  reduce_inside(plan.outputs[2]);
  const Running running(call, plan);
  if (axes.empty() && running.in_place()) {
    if (nothing_here(plan, call)) plan.local = zeros_of(plan, wide_statistics_dtype);
    return plan;
  }
  plan.local = [running, total = OverRanks{context_of(call.tensor(0).spec), axes, "statistics"},
                dims = b.reduced(), count = b.count](const OperatorHandle&, Stack a) {
    const at::Tensor& x = a[0].toTensor();
    const double momentum = a[6].toDouble(), eps = a[7].toDouble();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor wide = x.to(type);
    const at::Tensor mean = total(at::sum(wide, dims)).div_(count);
    const at::Tensor var =
        total(at::sum((wide - as_dim(mean, 1, x.dim())).square_(), dims)).div_(count);
    const at::Tensor invstd = at::rsqrt(var + eps);
    running.update(optional_tensor(a[3]), running.mean, mean, momentum, 1);
    running.update(optional_tensor(a[4]), running.var, var, momentum, count / (count - 1));
    const at::Tensor y =
        wide.numel() == 0
            ? at::empty_like(wide)
            : std::get<0>(at::native_batch_norm(wide, given(a[1], type), given(a[2], type), mean,
                                                var, /*training=*/false, 0, eps));
    const auto returned = wide_statistics_dtype(a);
    return Stack{y.to(x.scalar_type()), mean.to(returned), invstd.to(returned)};
  };
  return plan;
}

bool in_order(const at::Tensor& t) {
  return t.strides() == at::IntArrayRef(contiguous_strides(t.sizes().vec())) ||
         (t.dim() > 3 && t.strides() == at::IntArrayRef(channels_last(t.sizes().vec())));
}

// libtorch's kernel may treat a shard as channels_last whatever the strides of its dims of one
// element are, and reads the gradient by the input's.
Stack backward_in_order(const OperatorHandle& op, Stack a) {
  for (int i = 0; i < 3; ++i) {
    if (!a[i].isTensor() || !a[i].toTensor().defined()) continue;
    const at::Tensor& t = a[i].toTensor();
    if (!in_order(t)) a[i] = t.clone(at::MemoryFormat::Contiguous);
  }
  op.callBoxed(a);
  return a;
}

// With x^ the normalized input: dx = w invstd (dy - mean(dy) - x^ mean(dy x^)), dw = sum(dy x^), db
// = sum(dy).
Plan batch_norm_backward(const OpCall& call) {
  BatchNorm b(call);
  Plan plan = solve(b.problem);
  plan.outputs[0].strides = b.strides();
  plan.local = nothing_here(plan, call) ? zeros_of(plan, of_gradients) : backward_in_order;
  if (!call.boolean("train")) return plan;  // sample by sample; the sums are partial
  // not read: they stay as they are sharded
  for (const char* name : {"running_mean", "running_var"})
    if (const TensorInfo* t = call.find(name)) plan.inputs[call.index_of(*t)] = t->spec;
  const std::vector<int> axes = reduce_inside(plan.outputs[1]);
  reduce_inside(plan.outputs[2]);
  if (axes.empty()) return plan;
  plan.local = [total = OverRanks{context_of(call.tensor(0).spec), axes, "statistics"},
                dims = b.reduced(), count = b.count](const OperatorHandle&, Stack a) {
    const at::Tensor &g = a[0].toTensor(), &x = a[1].toTensor();
    const auto type = at::toOpMathType(x.scalar_type());
    const at::Tensor mean = a[5].toTensor().to(type), invstd = a[6].toTensor().to(type),
                     weight = given(a[2], type);
    at::Tensor dy = g.to(type), wide = x.to(type);
    if (dy.strides() != wide.strides() || !in_order(wide)) {
      dy = dy.contiguous();
      wide = wide.contiguous();
    }
    at::Tensor weight_gradient, bias_gradient;
    if (wide.numel() == 0) {
      weight_gradient = at::zeros({x.size(1)}, wide.options());
      bias_gradient = weight_gradient.clone();
    } else {  // sums by the statistics that the kernel is given
      std::tie(std::ignore, weight_gradient, bias_gradient) = at::native_batch_norm_backward(
          dy, wide, weight.defined() ? weight : at::ones_like(mean), {}, {}, mean, invstd,
          /*train=*/true, a[8].toDouble(), {false, true, true});
    }
    bias_gradient = total(bias_gradient);
    weight_gradient = total(weight_gradient);
    const auto by_channel = [&](const at::Tensor& t) { return as_dim(t, 1, x.dim()); };
    const at::Tensor dx = (dy - by_channel(bias_gradient.div(count)))
                              .addcmul_(wide - by_channel(mean),
                                        by_channel((weight_gradient * invstd).div_(count)), -1)
                              .mul_(by_channel(weight.defined() ? invstd * weight : invstd));
    const auto out = of_gradients(a);
    return Stack{dx.to(x.scalar_type()), weight_gradient.to(out), bias_gradient.to(out)};
  };
  return plan;
}

const AtStart registered([] {
  register_rule("aten::native_batch_norm", batch_norm);
  // Replicated ones too: a replicated and a sharded run of one model agree.
  register_rule("aten::native_batch_norm_backward", guarded(batch_norm_backward),
                {.for_replicated = true});
});

}  // namespace
}  // namespace tessera::detail::batch_norm_rules
