// Reductions: over a sharded dim each rank reduces its shard and the result is Partial; means are
// divided by the global count, so that uneven shards give what one process gives.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/ops/reductions/detail/reduced.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"

namespace tessera::detail::reductions_rules {
namespace {

Plan sum(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  const auto* out = call.outputs();
  if (out && !out->empty() && summands_keep_type(call, call.tensor(0))) p.linear_in = {0};
  return solve(p);
}

Plan mean(const OpCall& call) {
  LabelProblem p = reduction(call, ReduceOp::Kind::sum);
  const auto* out = call.outputs();
  if (!out || out->empty())
    throw ShardingError(call.name(), " with out= has no rule: use the form that returns");
  if (summands_keep_type(call, call.tensor(0))) p.linear_in = {0};
  Plan plan = solve(p);
  double count = 1;
  for (const int d : p.contract) count *= static_cast<double>(call.tensor(0).spec.shape()[d]);
  const Shape dims(p.contract.begin(), p.contract.end());
  // Summed in float32 if the result is of half precision: the sum of many may exceed its range
  // though the mean does not.
  plan.local = [count, dims, keep = keeps(call), dtype = (*out)[0].dtype,
                scalar = call.tensor(0).spec.dims() == 0](const OperatorHandle&, Stack arguments) {
    const at::Tensor& x = arguments[0].toTensor();
    const auto wide = at::toOpMathType(dtype);
    return Stack{(scalar ? x.to(wide) : at::sum(x, dims, keep, wide)).div(count).to(dtype)};
  };
  return plan;
}

// A mean over a sharded dim that backward goes through: the gradient of a sum is expanded, that of
// a mean written out besides, and a partial one is reduced as one value per result only where it is
// not.
bool mean_of_sum(Stack* stack, bool of_dims) {
  const auto a = torch::jit::last(*stack, of_dims ? 4 : 2);
  const at::Tensor self = a[0].toTensor();
  const ShardMeta* meta = meta_of(self);
  const auto dtype = a.back().toOptional<at::ScalarType>();
  if (!meta || !at::GradMode::is_enabled() || !self.requires_grad() ||
      at::toOpMathType(self.scalar_type()) != self.scalar_type() ||
      (dtype && *dtype != self.scalar_type()))
    return false;
  Shape dims;
  if (of_dims && !a[1].isNone()) dims = a[1].toIntVector();
  const std::int64_t n = self.dim();
  if (dims.empty()) dims = numbers_below(n);
  double elements = 1;
  bool sharded = false;
  for (const std::int64_t d : dims) {
    if (d < -n || d >= n) return false;
    elements *= static_cast<double>(self.size(d));
    sharded |= meta->spec().is_sharded(normal_dim(d, n));
  }
  if (!sharded || elements == 0) return false;
  return answer(stack, a.size(), self.sum(dims, of_dims && a[2].toBool()) / elements);
}

// Of a function that is not linear in the input.
template <ReduceOp::Kind op>
Plan reduced(const OpCall& call) {
  return solve(reduction(call, op));
}

// An empty shard has no maximum: it contributes the neutral value.
Plan extremum(const OpCall& call, bool max) {
  LabelProblem p = reduction(call, max ? ReduceOp::Kind::max : ReduceOp::Kind::min);
  Plan plan = solve(p);
  for (const int d : p.contract)
    if (call.tensor(0).spec.shape()[d] == 0)
      throw InvalidArgument(call.name(), ": dim ", d, " of ", list(call.tensor(0).spec.shape()),
                            " has no elements");
  if (plan.inputs[0]->local_numel() == 0) {
    plan.local = [shape = plan.outputs[0].spec.local_shape(), max](const OperatorHandle&,
                                                                   Stack arguments) {
      const at::Tensor& x = arguments[0].toTensor();
      return Stack{at::full(shape, neutral(x.scalar_type(), !max), x.options())};
    };
  }
  return plan;
}

at::Tensor count_nonzero(const at::Tensor& self, at::IntArrayRef dim) {
  return self.ne(0).sum(dim);
}
at::Tensor count_nonzero_dim(const at::Tensor& self, std::optional<std::int64_t> dim) {
  return dim ? self.ne(0).sum(*dim) : self.ne(0).sum();
}
at::Tensor nansum(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
                  std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!self.is_complex() && !(dtype && at::isComplexType(*dtype)),
              "nansum does not support complex inputs");
  return at::where(self.isnan(), at::zeros_like(self), self).sum(dim, keepdim, dtype);
}
std::tuple<at::Tensor, at::Tensor> aminmax(const at::Tensor& self, std::optional<std::int64_t> dim,
                                           bool keepdim) {
  if (dim) return {self.amin(*dim, keepdim), self.amax(*dim, keepdim)};
  const Shape all = numbers_below(self.dim());
  return {self.amin(all, keepdim), self.amax(all, keepdim)};
}

bool allclose(const at::Tensor& self, const at::Tensor& other, double rtol, double atol,
              bool equal_nan) {
  return at::isclose(self, other, rtol, atol, equal_nan).all().item<bool>();
}

// Each rank compares its shards.
bool equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  const auto comparable = [](const at::Tensor& t) {
    return at::isFloat8Type(t.scalar_type()) ? t.to(at::kFloat) : t;
  };
  return comparable(self.detach()).eq(comparable(other.detach())).all().item<bool>();
}

const AtStart registered([] {
  // Their shape or values depend on all elements at once, or the host reads them.
  register_rules({"aten::_local_scalar_dense", "aten::median", "aten::nanmedian", "aten::histc",
                  "aten::bincount", "aten::histogram", "aten::_histogramdd_bin_edges",
                  "aten::_histogramdd_from_bin_cts", "aten::_histogramdd_from_bin_tensors",
                  "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
                  "aten::unique_dim_consecutive", "aten::segment_reduce",
                  "aten::_segment_reduce_backward", "aten::hash_tensor"},
                 on_gathered);
  register_rules({"aten::sum", "aten::sum.dim_IntList"}, sum);
  register_rules({"aten::mean", "aten::mean.dim"}, mean);
  register_above("aten::mean", [](Stack* stack) { return mean_of_sum(stack, false); });
  register_above("aten::mean.dim", [](Stack* stack) { return mean_of_sum(stack, true); });
  register_rules({"aten::nansum", "aten::count_nonzero.dim_IntList"}, reduced<ReduceOp::Kind::sum>);
  register_rules({"aten::amax", "aten::max"}, [](const OpCall& c) { return extremum(c, true); });
  register_rules({"aten::amin", "aten::min"}, [](const OpCall& c) { return extremum(c, false); });
  register_rules({"aten::prod", "aten::prod.dim_int"}, reduced<ReduceOp::Kind::product>);
  register_rules({"aten::any", "aten::any.dim", "aten::any.dims"}, reduced<ReduceOp::Kind::max>);
  register_rules({"aten::all", "aten::all.dim", "aten::all.dims"}, reduced<ReduceOp::Kind::min>);
  register_decomposition("_is_any_true", [](const at::Tensor& t) { return t.any(); });
  register_decomposition("_is_all_true", [](const at::Tensor& t) { return t.all(); });
  register_decomposition("count_nonzero.dim_IntList", count_nonzero);
  register_decomposition("count_nonzero", count_nonzero_dim);
  register_decomposition("nansum", nansum);
  register_decomposition("aminmax", aminmax);
  register_decomposition("allclose", allclose);
  register_decomposition("equal", equal);
});

}  // namespace
}  // namespace tessera::detail::reductions_rules
