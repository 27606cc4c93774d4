// Products: rows and columns may be sharded; if the summed dim is, the result is a partial sum.

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mv.h>

#include <cmath>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/index_rule.h"

namespace tessera::detail::matmul_rules {
namespace {

void check_added(const char* name, const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                 at::IntArrayRef shape) {
  TORCH_CHECK(at::is_expandable_to(self.sizes(), shape), name, ": self of shape ", self.sizes(),
              " cannot be expanded to the product's ", shape);
  TORCH_CHECK(self.scalar_type() == a.scalar_type() && a.scalar_type() == b.scalar_type(), name,
              ": self is ", self.scalar_type(), ", the factors are ", a.scalar_type(), " and ",
              b.scalar_type(), "; convert them to one type");
}

// Of integers libtorch takes the whole part.
at::Scalar factor(const at::Scalar& number, at::ScalarType type) {
  TORCH_CHECK(!number.isComplex() || at::isComplexType(type), "a product of ", type,
              " values cannot be multiplied by a complex number");
  return at::isIntegralType(type, true) && number.isFloatingPoint()
             ? at::Scalar(static_cast<std::int64_t>(number.toDouble()))
             : number;
}

at::Tensor addbmm(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                  const at::Scalar& beta, const at::Scalar& alpha) {
  TORCH_CHECK(a.dim() == 3 && b.dim() == 3, "addbmm: the factors have ", a.dim(), " and ", b.dim(),
              " dims, and need 3");
  check_added("addbmm", self, a, b, {a.size(1), b.size(2)});
  // first in the sum: the result lies in memory as it does
  const at::Tensor product = at::bmm(a, b).sum(0) * factor(alpha, a.scalar_type());
  const at::Scalar share = factor(beta, a.scalar_type());
  return share.equal(0) ? product : product + self * share;
}

at::Tensor addmv(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 1, "addmv: the factors have ", a.dim(), " and ", b.dim(),
              " dims, and need 2 and 1");
  check_added("addmv", self, a, b, {a.size(0)});
  const at::Tensor product = at::mv(a, b) * factor(alpha, a.scalar_type());
  const at::Scalar share = factor(beta, a.scalar_type());
  return share.equal(0) ? product : product + self * share;
}

// Of integers the kernels cut beta and alpha to whole numbers, but where nothing is summed they
// refuse fractions: a rank whose shard of the summed dim is empty would throw alone.
Rule with_whole_factors(Rule rule) {
  return [rule = std::move(rule)](const OpCall& call) {
    Plan plan = rule(call);
    const bool partial = plan.outputs[0].spec.has_partial() ||
                         std::ranges::any_of(plan.inputs, [](const std::optional<ShardSpec>& s) {
                           return s && s->has_partial();
                         });
    // Summands that are infinite, or 0 times infinity, do not add up to the result.
    for (const char* name : {"beta", "alpha"})
      if (partial && !call.value(name).toScalar().isComplex() && !std::isfinite(call.number(name)))
        return on_gathered(call);
    const TensorInfo& x = call.tensor(1);
    if (plan.local || !at::isIntegralType(x.dtype, true) || x.spec.shape().back() == 0) return plan;
    plan.local = [](const OperatorHandle& op, Stack a) {
      for (c10::IValue& v : a)
        if (v.isDouble()) v = static_cast<std::int64_t>(v.toDouble());
      op.callBoxed(a);
      return a;
    };
    return plan;
  };
}

const AtStart registered([] {
  const auto product = [](const char* op, const char* notation) {
    register_rule(op, index_rule(notation, {.linear = true}));
  };
  // self is broadcast to the product; if that is a partial sum, one rank adds it
  const auto product_and_sum = [](const char* op, const char* notation) {
    register_rule(op, with_whole_factors(index_rule(notation, {.linear = true, .added = {0}})));
  };
  product("aten::mm", "m k, k n -> m n");
  product("aten::bmm", "b m k, b k n -> b m n");
  product("aten::mv", "m k, k -> m");
  product("aten::dot", "k, k ->");
  product("aten::vdot", "k, k ->");
  product_and_sum("aten::addmm", "m? n?, m k, k n -> m n");
  product_and_sum("aten::addmv", "m?, m k, k -> m");
  product_and_sum("aten::addr", "m? n?, m, n -> m n");
  product_and_sum("aten::addbmm", "m? n?, b m k, b k n -> m n");
  product_and_sum("aten::baddbmm", "b? m? n?, b m k, b k n -> b m n");
  register_decomposition("addbmm", addbmm);
  register_decomposition("addmv", addmv);
});

}  // namespace
}  // namespace tessera::detail::matmul_rules
