// Linear algebra: factorisations, solvers and determinants of the matrices in the last dims, whose
// batch dims may be sharded; distances between rows; traces.

#include <ATen/TensorGeometry.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/kron.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>
#include <string>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/index_rule.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"

namespace tessera::detail::linear_algebra_rules {
namespace {

// ---- batches of matrices ----

/// Number of dims at the end of each argument that belong to one problem; all others are batch
/// dims, aligned at the end.
using Trailing = std::map<std::string, int>;

// The right-hand side of a system may be one vector per matrix.
bool is_vector_of(const OpCall& call, const TensorInfo& b, const TensorInfo& a) {
  if (b.spec.dims() == 1) return true;
  const Shape& m = a.spec.shape();
  return b.spec.dims() == a.spec.dims() - 1 &&
         (call.argument("left") < 0 || std::equal(m.begin(), m.end() - 1, b.spec.shape().begin()));
}

Plan batched(const OpCall& call, const Trailing& trailing) {
  const auto* outputs = call.outputs();
  if (!outputs) return on_gathered(call);
  const auto own = [&](const TensorInfo& t) {
    const std::string& name = call.schema().arguments()[t.argument].name();
    const auto it = trailing.find(name);
    const int n = it == trailing.end() ? 2 : it->second;
    return n < 0 ? (is_vector_of(call, t, call.tensor(0)) ? 1 : 2) : n;
  };
  Shape extent;
  for (const TensorInfo& t : call.tensors())
    broadcast_with(extent,
                   at::IntArrayRef(t.spec.shape()).slice(0, std::max(t.spec.dims() - own(t), 0)));
  const int batches = static_cast<int>(extent.size());
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    Labels labels(t.spec.dims(), kUnsharded);
    const int lead = t.spec.dims() - own(t);
    for (int d = 0; d < lead; ++d)
      if (t.spec.shape()[d] == extent[batches - lead + d]) labels[d] = batches - lead + d;
    p.inputs.push_back(std::move(labels));
  }
  for (const OutputInfo& out : *outputs) {
    const int n = static_cast<int>(out.shape.size());
    // A result without some batch dim would be wrong on every rank but one: then nothing is
    // sharded.
    if (out.defined && batches > 0 &&
        (n < batches || out.shape == Shape{0} ||
         !std::equal(extent.begin(), extent.end(), out.shape.begin())))
      return on_gathered(call);
    p.outputs.push_back(first_dims_free(n, out.defined ? batches : 0));
  }
  return solve(p);
}

// Of an operator whose gradient uses the factors of its first argument, transposed or not as that
// lies in memory: each rank's matrices lie as the gradient will see the global ones.
Plan factors_kept(const OpCall& call, const Trailing& trailing) {
  Plan plan = batched(call, trailing);
  const TensorInfo& a = call.tensor(0);
  const bool by_rows = at::geometry_is_contiguous(a.spec.shape(), a.strides);
  plan.local = [by_rows, local = plan.local](const OperatorHandle& op, Stack s) {
    const at::Tensor given = s[0].toTensor();
    if (given.is_contiguous() != by_rows)
      s[0] = by_rows ? given.contiguous() : given.mT().contiguous().mT();
    if (local) return local(op, std::move(s));
    op.callBoxed(s);
    return s;
  };
  return plan;
}

// ---- distances between the rows of two matrices ----

// Of batches that are broadcast nothing is sharded.
Rule distances(const char* notation) {
  return guarded([of_rows = index_rule(notation)](const OpCall& call) {
    const Shape &a = call.find("x1")->spec.shape(), &b = call.find("x2")->spec.shape();
    const bool alike = a.size() == b.size() && std::equal(a.begin(), a.end() - 2, b.begin());
    return alike ? of_rows(call) : on_gathered(call);
  });
}

// For checks of each rank's shard: a rank reports an error by itself.
Plan checked(const OpCall&) { return {}; }

// Each rank sums the diagonal's elements that it holds. libtorch's own derivative writes into a
// plain tensor of the global size.
at::Tensor trace(const at::Tensor& self) {
  TORCH_CHECK(self.dim() == 2, "trace: expected a matrix, but got a tensor of ", self.dim(),
              " dims");
  TORCH_CHECK(self.scalar_type() != at::kBool, "trace of booleans: convert them");
  return self.tril().triu().sum();
}

// libtorch writes into another shape of `out`, which of shards is a copy where they do not divide
// alike: what is written there would be lost.
at::Tensor& kron_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  TORCH_CHECK(!at::GradMode::is_enabled() ||
                  !(self.requires_grad() || other.requires_grad() || out.requires_grad()),
              "kron(): functions with out=... arguments don't support automatic differentiation, "
              "but one of the arguments requires grad.");
  const at::Tensor made = at::kron(self, other);
  if (!c10::canCast(made.scalar_type(), out.scalar_type()))
    throw InvalidArgument("aten::kron.out: the result is ", toString(made.scalar_type()),
                          ", which out, being ", toString(out.scalar_type()), ", cannot hold");
  if (out.sizes() != made.sizes())
    throw ShardingError("aten::kron.out: the result has shape ", made.sizes(), ", out has shape ",
                        out.sizes(), ", and shards keep their shape");
  out.copy_(made);
  return out;
}

// The derivative of the exponential of matrices at `at` in the direction `by`: the upper right
// block of exp([[at, by], [0, at]]) (Mathias, "A chain rule for matrix functions and applications",
// 1996).
at::Tensor derivative_of_exp(const at::Tensor& at, const at::Tensor& by) {
  const auto n = at.sym_size(-1);
  const at::Tensor above = at::cat({at, by}, -1), below = at::cat({at::zeros_like(at), at}, -1);
  return at::linalg_matrix_exp(at::cat({above, below}, -2))
      .slice_symint(-2, 0, n)
      .slice_symint(-1, n, 2 * n);
}

// libtorch's own gradient writes the blocks into a plain tensor of the global shape.
struct MatrixExp : torch::autograd::Function<MatrixExp> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self) {
    ctx->save_for_backward({self});
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return at::linalg_matrix_exp(self);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    if (!g[0].defined()) return {at::Tensor()};
    return {derivative_of_exp(ctx->get_saved_variables()[0].mH(), g[0])};
  }
};

bool differentiable_exp(Stack* stack) {
  const at::Tensor self = stack->back().toTensor();
  if (!self.requires_grad() || !at::GradMode::is_enabled() || self._fw_grad(0).defined())
    return false;
  stack->back() = MatrixExp::apply(self);
  return true;
}

// The rule of an operator on matrices, but for the arguments that are named.
Rule of_matrices(const Trailing& trailing) {
  return guarded([trailing](const OpCall& call) { return batched(call, trailing); });
}

const AtStart registered([] {
  register_rules({"aten::linalg_lu_factor_ex", "aten::linalg_lu", "aten::linalg_cholesky_ex",
                  "aten::linalg_qr", "aten::geqrf", "aten::_linalg_svd", "aten::_linalg_eigh",
                  "aten::linalg_eig", "aten::linalg_eigvals", "aten::_linalg_eigvals",
                  "aten::linalg_ldl_factor_ex", "aten::linalg_polar", "aten::cholesky"},
                 of_matrices({}));
  register_rules({"aten::linalg_inv_ex", "aten::inverse", "aten::cholesky_inverse",
                  "aten::cholesky_solve", "aten::linalg_solve_triangular", "aten::triangular_solve",
                  "aten::linalg_matrix_exp", "aten::linalg_matrix_sqrth"},
                 of_matrices({}));
  register_rule("aten::lu_unpack", of_matrices({{"LU_pivots", 1}}));
  register_rules({"aten::linalg_lu_solve", "aten::linalg_ldl_solve"}, of_matrices({{"pivots", 1}}));
  register_rules({"aten::linalg_householder_product", "aten::ormqr"},
                 of_matrices({{"tau", 1}, {"input2", 1}}));
  register_rule("aten::linalg_lstsq", of_matrices({{"b", -1}}));
  register_rules({"aten::_linalg_det", "aten::_linalg_slogdet", "aten::_linalg_solve_ex"},
                 guarded([](const OpCall& c) { return factors_kept(c, {{"B", -1}}); }));
  // Made of a factorisation and products, which autocast casts.
  register_rule("aten::linalg_pinv.atol_rtol_tensor", of_matrices({{"atol", 0}, {"rtol", 0}}),
                {.composed = true});
  register_rule("aten::_linalg_check_errors", checked);
  register_rules({"aten::_cdist_forward", "aten::_euclidean_dist"},
                 distances("... r d!, ... o d! -> ... r o"));
  register_rule("aten::_cdist_backward",
                distances("... r o, ... r d!, ... o d!, ... r o -> ... r d!"));
  register_rules({"aten::_pdist_forward", "aten::_pdist_backward", "aten::_trilinear",
                  "aten::_cholesky_solve_helper", "aten::_compute_linear_combination"},
                 on_gathered);
  register_above("aten::linalg_matrix_exp", differentiable_exp);
  register_decomposition("trace", trace);
  register_decomposition("kron.out", kron_out);
});

}  // namespace
}  // namespace tessera::detail::linear_algebra_rules
