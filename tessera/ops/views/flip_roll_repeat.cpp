// Elements that change places: turned, rolled, repeated, put on diagonals or left out beside them.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <set>
#include <vector>

#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::flip_roll_repeat_rules {

namespace {

using Shape = std::vector<std::int64_t>;

// Elements change places along whole dims.
Plan rearranged(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  Labels labels = all_labels(n);
  std::set<int> whole;
  for (const auto d : call.integers("dims")) whole.insert(static_cast<int>(normal_dim(d, n)));
  // roll of the flattened tensor
  if (whole.empty() && call.argument("shifts") >= 0) whole = first_dims(n);
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

// The last dim becomes a diagonal of two.
Plan diag_embed(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims() + 1;
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  const std::int64_t length = x.spec.shape().back() + std::abs(call.integer("offset"));
  LabelProblem p(call);
  Labels in = all_labels(n - 1), out;
  in.back() = kWhole;
  Shape shape;
  for (int d = 0, next = 0; d < n; ++d) {
    const bool diagonal = d == a || d == b;
    shape.push_back(diagonal ? length : x.spec.shape()[next]);
    out.push_back(diagonal ? kWhole : next++);
  }
  p.inputs = {in};
  p.outputs = {out};
  p.output_shapes = {shape};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  return solve(p);
}

at::Tensor rot90(const at::Tensor& self, std::int64_t k, at::IntArrayRef dims) {
  TORCH_CHECK(dims.size() == 2, "expected total rotation dims == 2, but got dims = ", dims.size());
  switch (((k % 4) + 4) % 4) {
    case 1:
      return self.flip({dims[1]}).transpose_(dims[0], dims[1]);
    case 2:
      return self.flip(dims);
    case 3:
      return self.flip({dims[0]}).transpose_(dims[0], dims[1]);
    default:
      return self.clone(at::MemoryFormat::Contiguous);
  }
}

const bool registered = [] {
  for (const char* op : {"aten::flip", "aten::roll"}) register_rule(op, rearranged);
  register_rule("aten::repeat", repeat);
  for (const char* op : {"aten::tril", "aten::triu"}) register_rule(op, triangle);
  register_rule("aten::diag_embed", diag_embed);
  register_decomposition("rot90", rot90);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::flip_roll_repeat_rules
