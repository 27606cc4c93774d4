// Vector norms of any order: the p-norm of the ranks' p-norms.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/norm.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tessera/ops/reductions/reduced.h"
#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/over_ranks.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::vector_norm_rules {

namespace {

using Shape = std::vector<std::int64_t>;

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

at::Tensor dist(const at::Tensor& self, const at::Tensor& other, const at::Scalar& p) {
  return at::norm(self - other, p);
}

// The tensors of a list may lie anywhere: each has a norm of its own (clip_grad_norm_).
std::vector<at::Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order,
                                     std::optional<at::ScalarType> dtype) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& t : tensors)
    norms.push_back(at::linalg_vector_norm(t, order, std::nullopt, false, dtype));
  return norms;
}

const bool registered = [] {
  for (const char* op :
       {"aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim"})
    register_rule(op, norm);
  register_rule("aten::renorm", renorm);
  register_decomposition("dist", dist);
  register_decomposition("_foreach_norm.Scalar", foreach_norm);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::vector_norm_rules
