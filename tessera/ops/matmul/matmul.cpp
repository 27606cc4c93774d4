// Products: rows and columns may be sharded; where the summed dim is, the result is a partial sum.

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mv.h>

#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::matmul_rules {

namespace {

enum : int { M, K, N, B };

Plan product(const OpCall& call, const Labels& a, const Labels& b, const Labels& out) {
  LabelProblem p(call);
  p.inputs = {a, b};
  p.outputs = {out};
  // dot has no meta kernel; its result has no dims
  if (out.empty()) p.output_shapes.emplace_back();
  p.contract = {K};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0, 1};
  return solve(p);
}

// self is stretched to the product and added: where the product is a partial sum, one rank adds it.
Plan product_and_sum(const OpCall& call, const Labels& a, const Labels& b, const Labels& out) {
  LabelProblem p(call);
  const auto& shape = call.tensor(0).spec.shape();
  const auto& sa = call.tensor(1).spec.shape();
  const auto& sb = call.tensor(2).spec.shape();
  const auto extent = [&](int label) {
    for (std::size_t d = 0; d < a.size(); ++d) {
      if (a[d] == label) return sa[d];
    }
    for (std::size_t d = 0; d < b.size(); ++d) {
      if (b[d] == label) return sb[d];
    }
    return std::int64_t{1};
  };
  Labels added;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const int label = out[out.size() - shape.size() + d];
    added.push_back(shape[d] == extent(label) ? label : kWhole);
  }
  p.inputs = {added, a, b};
  p.outputs = {out};
  if (!call.outputs()) {
    p.output_shapes.emplace_back();
    for (const int label : out) p.output_shapes[0].push_back(extent(label));
  }
  p.contract = {K, B};
  p.additive = {0};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {1, 2};
  return solve(p);
}

at::Tensor addbmm(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                  const at::Scalar& beta, const at::Scalar& alpha) {
  // first in the sum: the result lies in memory as it does
  const at::Tensor product = at::bmm(a, b).sum(0) * alpha;
  return beta.equal(0) ? product : product + self * beta;
}

at::Tensor addmv(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  const at::Tensor product = at::mv(a, b) * alpha;
  return beta.equal(0) ? product : product + self * beta;
}

const bool registered = [] {
  register_rule("aten::mm", [](const OpCall& c) { return product(c, {M, K}, {K, N}, {M, N}); });
  register_rule("aten::bmm",
                [](const OpCall& c) { return product(c, {B, M, K}, {B, K, N}, {B, M, N}); });
  register_rule("aten::mv", [](const OpCall& c) { return product(c, {M, K}, {K}, {M}); });
  for (const char* op : {"aten::dot", "aten::vdot"})
    register_rule(op, [](const OpCall& c) { return product(c, {K}, {K}, {}); });
  register_rule("aten::addmm",
                [](const OpCall& c) { return product_and_sum(c, {M, K}, {K, N}, {M, N}); });
  register_rule("aten::addmv",
                [](const OpCall& c) { return product_and_sum(c, {M, K}, {K}, {M}); });
  register_rule("aten::addr", [](const OpCall& c) { return product_and_sum(c, {M}, {N}, {M, N}); });
  register_rule("aten::addbmm",
                [](const OpCall& c) { return product_and_sum(c, {B, M, K}, {B, K, N}, {M, N}); });
  register_rule("aten::baddbmm", [](const OpCall& c) {
    return product_and_sum(c, {B, M, K}, {B, K, N}, {B, M, N});
  });
  register_decomposition("addbmm", addbmm);
  register_decomposition("addmv", addmv);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::matmul_rules
