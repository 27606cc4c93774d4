// Reductions: over a sharded dim each rank reduces its part and the result is partial; means are
// divided by the global count, so that uneven parts give what one process gives. Scans, sorts and
// the like work along a dim that must be whole.

#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sum.h>

#include <cmath>
#include <limits>

#include "tessera/base/text.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

namespace {

using Shape = std::vector<std::int64_t>;

std::set<int> reduced_dims(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  std::set<int> dims;
  if (call.argument("dim") >= 0 && call.has("dim")) {
    for (const auto d : call.integers("dim")) dims.insert(static_cast<int>(normal_dim(d, n)));
  }
  if (dims.empty()) {
    for (int d = 0; d < n; ++d) dims.insert(d);
  }
  if (n == 0) dims.clear();
  return dims;
}

bool keeps(const OpCall& call) { return call.argument("keepdim") >= 0 && call.boolean("keepdim"); }

std::set<int> some_dims(int n) {
  std::set<int> all;
  for (int d = 0; d < n; ++d) all.insert(d);
  return all;
}

Labels remaining(int n, const std::set<int>& dims, bool keep) {
  Labels out;
  for (int d = 0; d < n; ++d) {
    if (!dims.contains(d)) {
      out.push_back(d);
    } else if (keep) {
      out.push_back(kWhole);
    }
  }
  return out;
}

Shape shape_without(const Shape& shape, const std::set<int>& dims, bool keep) {
  Shape out;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (!dims.contains(d)) {
      out.push_back(shape[d]);
    } else if (keep) {
      out.push_back(1);
    }
  }
  return out;
}

LabelProblem reduction(const OpCall& call, ReduceOp::Kind op) {
  const int n = call.tensor(0).spec.dims();
  const auto dims = reduced_dims(call);
  LabelProblem p(call);
  p.inputs = {all_labels(n)};
  p.outputs = {remaining(n, dims, keeps(call))};
  if (!call.outputs())
    p.output_shapes = {shape_without(call.tensor(0).spec.shape(), dims, keeps(call))};
  p.contract = dims;
  p.reduce = op;
  return p;
}

Plan sum(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  return solve(p);
}

Plan mean(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  double count = 1;
  for (const int d : p.contract) count *= static_cast<double>(call.tensor(0).spec.shape()[d]);
  const Shape dims(p.contract.begin(), p.contract.end());
  plan.local = [count, dims, keep = keeps(call), dtype = (*call.outputs())[0].dtype,
                scalar = call.tensor(0).spec.dims() == 0](const c10::OperatorHandle&,
                                                          torch::jit::Stack arguments) {
    const at::Tensor& x = arguments[0].toTensor();
    return torch::jit::Stack{(scalar ? x.to(dtype) : at::sum(x, dims, keep, dtype)).div(count)};
  };
  return plan;
}

at::Scalar lowest(at::ScalarType t) {
  if (at::isFloatingType(t)) return -std::numeric_limits<double>::infinity();
  if (t == at::kBool) return false;
  return t == at::kByte    ? at::Scalar(0)
         : t == at::kChar  ? at::Scalar(-128)
         : t == at::kShort ? at::Scalar(-32768)
         : t == at::kInt   ? at::Scalar(std::numeric_limits<int>::min())
                           : at::Scalar(std::numeric_limits<std::int64_t>::min());
}
at::Scalar highest(at::ScalarType t) {
  if (at::isFloatingType(t)) return std::numeric_limits<double>::infinity();
  if (t == at::kBool) return true;
  return t == at::kByte    ? at::Scalar(255)
         : t == at::kChar  ? at::Scalar(127)
         : t == at::kShort ? at::Scalar(32767)
         : t == at::kInt   ? at::Scalar(std::numeric_limits<int>::max())
                           : at::Scalar(std::numeric_limits<std::int64_t>::max());
}

// Sums of what is not linear in the input.
Plan count(const OpCall& call) { return solve(reduction(call, ReduceOp::Kind::sum)); }

// An empty part has no maximum: it contributes the value that every other one beats.
Plan extremum(const OpCall& call, bool max) {
  LabelProblem p = reduction(call, max ? ReduceOp::Kind::max : ReduceOp::Kind::min);
  Plan plan = solve(p);
  for (const int d : p.contract) {
    if (call.tensor(0).spec.shape()[d] == 0)
      throw InvalidArgument(concat(call.name(), ": dim ", d, " of ",
                                   list(call.tensor(0).spec.shape()), " has no elements"));
  }
  if (plan.inputs[0]->local_numel() == 0) {
    plan.local = [shape = plan.outputs[0].spec.local_shape(), max](const c10::OperatorHandle&,
                                                                   torch::jit::Stack arguments) {
      const at::Tensor& x = arguments[0].toTensor();
      return torch::jit::Stack{
          at::full(shape, max ? lowest(x.scalar_type()) : highest(x.scalar_type()), x.options())};
    };
  }
  return plan;
}

Plan product(const OpCall& call) { return solve(reduction(call, ReduceOp::Kind::product)); }
Plan any(const OpCall& call) { return solve(reduction(call, ReduceOp::Kind::max)); }
Plan all(const OpCall& call) { return solve(reduction(call, ReduceOp::Kind::min)); }

// The p-norm of the ranks' p-norms.
Plan norm(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  const char* name = call.argument("ord") >= 0 ? "ord" : "p";
  const double order = call.has(name) ? call.number(name) : 2.0;
  const ShardSpec in = without_partial(call.tensor(0).spec);
  Plan plan = solve(p);
  if (order == 0) return plan;  // counts add up
  const bool infinite = std::isinf(order);
  std::vector<int> axes;
  ShardSpec out = plan.outputs[0].spec;
  auto placements = out.placements();
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!placements[a].is_partial()) continue;
    axes.push_back(static_cast<int>(a));
    placements[a] = Replicate();
  }
  if (axes.empty()) return plan;
  plan.outputs[0].spec = out.with_placements(placements);
  plan.local = [order, infinite, axes, context = context_of(in),
                local_shape = plan.outputs[0].spec.local_shape(),
                empty = plan.inputs[0]->local_numel() == 0](const c10::OperatorHandle& op,
                                                            torch::jit::Stack arguments) {
    at::Tensor part;
    // kernels refuse some orders of nothing; a negative one of nothing is infinite, so that nothing
    // is added
    if (empty) {
      const at::Tensor& x = arguments[0].toTensor();
      part = at::full(local_shape, order > 0 ? 0.0 : std::numeric_limits<double>::infinity(),
                      x.options().dtype(c10::toRealValueType(x.scalar_type())));
    } else {
      op.callBoxed(arguments);
      part = arguments[0].toTensor();
    }
    part = infinite ? part.clone() : part.pow(order);
    for (const int axis : axes)
      context->group(axis).all_reduce(
          part, infinite ? (order > 0 ? ReduceOp::max : ReduceOp::min) : ReduceOp::sum,
          {.name = "norm"});
    return torch::jit::Stack{infinite ? part : part.pow(1.0 / order)};
  };
  return plan;
}

// Results with and without the reduced dim, all of one shape, and the dim whole: max.dim, argmax,
// median...
Plan along_reduced(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const auto dims = reduced_dims(call);
  LabelProblem p(call);
  Labels in = all_labels(n);
  for (const int d : dims) in[d] = kWhole;
  p.inputs = {in};
  p.outputs.assign(call.schema().returns().size(), remaining(n, dims, keeps(call)));
  if (!call.outputs())
    p.output_shapes.assign(p.outputs.size(),
                           shape_without(call.tensor(0).spec.shape(), dims, keeps(call)));
  return solve(p);
}

// Same number of dims in and out, `dim` whole, the others free: softmax, cumsum, sort, topk,
// flip...
Plan along(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  std::set<int> whole;
  for (const char* name : {"dim", "dims"}) {
    if (call.argument(name) < 0 || !call.has(name)) continue;
    for (const auto d : call.integers(name)) whole.insert(static_cast<int>(normal_dim(d, n)));
  }
  if (whole.empty()) {
    for (int d = 0; d < n; ++d) whole.insert(d);
  }
  LabelProblem p(call);
  Labels labels = all_labels(n);
  for (const int d : whole) {
    if (d < n) labels[d] = kWhole;
  }
  for (const TensorInfo& t : call.tensors()) {
    Labels own = t.spec.dims() == n ? labels : Labels(t.spec.dims(), kWhole);
    for (int d = 0; d < t.spec.dims() && t.spec.dims() == n; ++d) {
      if (t.spec.shape()[d] == call.tensor(0).spec.shape()[d]) continue;
      own[d] = labels[d] = kWhole;  // gather with a smaller index
    }
    p.inputs.push_back(own);
  }
  for (Labels& own : p.inputs) {
    for (std::size_t d = 0; d < own.size() && own.size() == labels.size(); ++d) {
      if (labels[d] == kWhole) own[d] = kWhole;
    }
  }
  p.outputs.assign(call.schema().returns().size(), labels);
  // of a backward the result is shaped as what was differentiated
  const TensorInfo* self = call.find("self");
  if (!call.outputs())
    p.output_shapes.assign(p.outputs.size(), (self ? *self : call.tensor(0)).spec.shape());
  return solve(p);
}

// Each slice along `dim` has a norm over all the others, which are whole.
Plan renorm(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  p.inputs = {Labels(n, kWhole)};
  p.inputs[0][d] = d;
  p.outputs = p.inputs;
  if (!call.outputs()) p.output_shapes = {call.tensor(0).spec.shape()};
  return solve(p);
}

// Elements change places along whole dims.
Plan rearranged(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  Labels labels = all_labels(n);
  std::set<int> whole;
  for (const auto d : call.integers("dims")) whole.insert(static_cast<int>(normal_dim(d, n)));
  // roll of the flattened tensor
  if (whole.empty() && call.argument("shifts") >= 0) whole = some_dims(n);
  for (const int d : whole) {
    if (d < n) labels[d] = kWhole;
  }
  LabelProblem p(call);
  p.inputs = {labels};
  p.outputs = {labels};
  p.output_shapes = {x.spec.shape()};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  // flip keeps a dense memory order, roll makes row-major.
  if (call.argument("shifts") < 0 && is_dense(x.spec.shape(), x.strides))
    plan.outputs[0].strides = strides_in_order(x.spec.shape(), x.strides);
  return plan;
}

// Repeated dims are whole.
Plan repeat(const OpCall& call) {
  const Shape times = call.integers("repeats"), &shape = call.tensor(0).spec.shape();
  const std::size_t lead = times.size() - shape.size();
  LabelProblem p(call);
  Labels in(shape.size(), kWhole), out(times.size(), kWhole);
  Shape result = times;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    result[lead + d] *= shape[d];
    if (times[lead + d] == 1) in[d] = out[lead + d] = static_cast<int>(d);
  }
  p.inputs = {in};
  p.outputs = {out};
  p.output_shapes = {result};
  return solve(p);
}

// tril, triu: where a rank's rows and columns begin moves its diagonal.
Plan triangle(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  LabelProblem p(call);
  p.inputs = {all_labels(n)};
  p.outputs = {all_labels(n)};
  p.output_shapes = {call.tensor(0).spec.shape()};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  const auto& offset = plan.inputs[0]->local_offset();
  if (n >= 2)
    plan.arguments = {
        {call.argument("diagonal"), call.integer("diagonal") + offset[n - 2] - offset[n - 1]}};
  return plan;
}

const bool reductions_registered = [] {
  for (const char* op : {"aten::sum", "aten::sum.dim_IntList"}) register_rule(op, sum);
  for (const char* op : {"aten::mean", "aten::mean.dim"}) register_rule(op, mean);
  for (const char* op : {"aten::nansum", "aten::count_nonzero.dim_IntList"})
    register_rule(op, count);
  for (const char* op : {"aten::amax", "aten::max"})
    register_rule(op, [](const OpCall& c) { return extremum(c, true); });
  for (const char* op : {"aten::amin", "aten::min"})
    register_rule(op, [](const OpCall& c) { return extremum(c, false); });
  for (const char* op : {"aten::prod", "aten::prod.dim_int"}) register_rule(op, product);
  for (const char* op : {"aten::any", "aten::any.dim", "aten::any.dims"}) register_rule(op, any);
  for (const char* op : {"aten::all", "aten::all.dim", "aten::all.dims"}) register_rule(op, all);
  for (const char* op :
       {"aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim"})
    register_rule(op, norm);
  for (const char* op :
       {"aten::max.dim", "aten::min.dim", "aten::argmax", "aten::argmin", "aten::median.dim",
        "aten::nanmedian.dim", "aten::mode", "aten::kthvalue", "aten::logsumexp"}) {
    register_rule(op, along_reduced);
  }
  for (const char* op : {"aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::sort",
                         "aten::sort.stable", "aten::topk", "aten::_safe_softmax", "aten::cummax",
                         "aten::cummin", "aten::glu", "aten::glu_backward", "aten::linalg_cross"}) {
    register_rule(op, along);
  }
  register_rule("aten::renorm", renorm);
  for (const char* op : {"aten::flip", "aten::roll"}) register_rule(op, rearranged);
  register_rule("aten::repeat", repeat);
  for (const char* op : {"aten::tril", "aten::triu"}) register_rule(op, triangle);
  return true;
}();

}  // namespace

}  // namespace tessera::detail
