#include "tessera/ops/matmul/detail/contract.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>
#include <string>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/promote.h"

namespace tessera::detail {
namespace {

using Indices = std::vector<std::int64_t>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor on_plain(const at::Tensor& a, const at::Tensor& b, at::IntArrayRef la,
                    at::IntArrayRef lb, at::IntArrayRef lo) {
  return at::einsum(equation_of(la, lb, lo), {a, b}).contiguous();
}

// Each gradient is a contraction of the other input with the result's gradient.
struct Contract : torch::autograd::Function<Contract> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b,
                            Indices la, Indices lb, Indices lo) {
    ctx->save_for_backward({a, b});
    ctx->set_materialize_grads(false);
    ctx->saved_data["a"] = la;
    ctx->saved_data["b"] = lb;
    ctx->saved_data["o"] = lo;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return contract(a, b, la, lb, lo);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const auto saved = ctx->get_saved_variables();
    const Indices la = ctx->saved_data["a"].toIntVector(), lb = ctx->saved_data["b"].toIntVector(),
                  lo = ctx->saved_data["o"].toIntVector();
    variable_list result(5);
    if (!g[0].defined()) return result;
    if (ctx->needs_input_grad(0)) result[0] = contract(g[0], saved[1].conj(), lo, lb, la);
    if (ctx->needs_input_grad(1)) result[1] = contract(saved[0].conj(), g[0], la, lo, lb);
    return result;
  }
};

at::Tensor with_autograd(const at::Tensor& a, const at::Tensor& b, at::IntArrayRef la,
                         at::IntArrayRef lb, at::IntArrayRef lo) {
  return Contract::apply(a, b, la.vec(), lb.vec(), lo.vec());
}

Plan contract_rule(const OpCall& c) {
  if (c.tensor(0).dtype == at::kBool)
    throw InvalidArgument("a product of booleans: convert them to integers first");
  // The kernels compare them too, but a rank without elements calls none.
  if (c.tensor(0).dtype != c.tensor(1).dtype)
    throw InvalidArgument("a product of ", toString(c.tensor(0).dtype), " and ",
                          toString(c.tensor(1).dtype), ": convert one of them");
  const auto labels = [&](const char* name) {
    return mapped(c.integers(name), [](std::int64_t l) { return static_cast<int>(l); });
  };
  LabelProblem p(c, {labels("of_a"), labels("of_b")}, {labels("of_result")});
  std::map<int, std::int64_t> extent;
  for (int i = 0; i < 2; ++i) {
    for (std::size_t d = 0; d < p.inputs[i].size(); ++d) {
      const std::int64_t size = c.tensor(i).spec.shape().at(d);
      const auto [known, added] = extent.emplace(p.inputs[i][d], size);
      if (!added && known->second != size)
        throw InvalidArgument("a product of tensors of shapes ", list(c.tensor(0).spec.shape()),
                              " and ", list(c.tensor(1).spec.shape()), ": ", known->second, " and ",
                              size, " elements are to be multiplied with each other");
    }
  }
  p.output_shapes.emplace_back();
  for (const int l : p.outputs[0]) {
    p.output_shapes[0].push_back(extent[l]);
    extent.erase(l);
  }
  for (const auto& [l, n] : extent) p.contract.insert(l);
  p.linear_in = {0, 1};
  return solve(p);
}

// True if flattening dims 0 .. end - 1 would break up a sharded dim.
bool breaks_sharded_dim(const at::Tensor& t, std::int64_t end) {
  const ShardMeta* meta = meta_of(t);
  if (!meta) return false;
  for (std::int64_t d = 1; d < end; ++d)
    if (meta->spec().is_sharded(static_cast<int>(d))) return true;
  return false;
}

at::Tensor linear(const at::Tensor& given_x, const at::Tensor& given_w,
                  const std::optional<at::Tensor>& given_bias) {
  at::Tensor x = given_x, w = given_w, b = given_bias.value_or(at::Tensor());
  ParameterCasts casts;
  if (const ShardMeta* meta = meta_of(w); meta && casts_parameters(*meta))
    casts = cast_tensors({&x, &w, &b});
  const std::optional<at::Tensor> bias = b.defined() ? std::optional(b) : std::nullopt;
  // Of other dims libtorch adds it in a step of its own.
  TORCH_CHECK(!bias || (x.dim() != 2 && x.dim() != 3) || b.scalar_type() == x.scalar_type(),
              "linear: the bias is ", b.scalar_type(), ", the input ", x.scalar_type());
  const auto y = sequence_linear(x, w, bias);
  return cast_result(y ? *y : linear_of_shards(x, w, bias), casts);
}

at::Tensor matmul(const at::Tensor& given_a, const at::Tensor& given_b) {
  at::Tensor a = given_a, b = given_b;
  ParameterCasts casts;
  const ShardMeta* meta = meta_of(a) ? meta_of(a) : meta_of(b);
  if (meta && casts_parameters(*meta)) casts = cast_tensors({&a, &b});
  const auto y = sequence_linear(a, b, std::nullopt, /*transposed=*/true);
  return cast_result(y ? *y : matmul_of_shards(a, b), casts);
}

// The product of each of the last rows of `a` and a matrix or vector.
at::Tensor of_rows(const at::Tensor& a, const at::Tensor& b) {
  std::vector<std::int64_t> shape = a.sizes().vec();
  shape.pop_back();
  const at::Tensor rows = a.reshape({c10::multiply_integers(shape), a.size(-1)});
  if (b.dim() == 2) shape.push_back(b.size(1));
  return at::_unsafe_view(b.dim() == 2 ? rows.mm(b) : rows.mv(b), shape);
}

const AtStart contract_registered([] {
  register_rule("tessera::contract", contract_rule);
  register_decomposition("linear", linear);
  register_decomposition("matmul", matmul);
});

}  // namespace

std::string equation_of(at::IntArrayRef of_a, at::IntArrayRef of_b, at::IntArrayRef of_result) {
  std::string text;
  const auto add = [&](at::IntArrayRef labels) {
    for (const auto l : labels) text += static_cast<char>(l < 26 ? 'A' + l : 'a' + l - 26);
  };
  add(of_a);
  text += ',';
  add(of_b);
  text += "->";
  add(of_result);
  return text;
}

at::Tensor linear_of_shards(const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& bias) {
  if (x.dim() < 3 || w.dim() != 2 || !breaks_sharded_dim(x, x.dim() - 1))
    return at::native::linear(x, w, bias);
  const std::int64_t n = x.dim();
  Indices lx(n), lo(n);
  for (std::int64_t i = 0; i < n; ++i) lx[i] = lo[i] = i;
  lo[n - 1] = n;
  const at::Tensor y = contract(x, w, lx, {n, n - 1}, lo);
  return bias && bias->defined() ? y + *bias : y;
}

at::Tensor matmul_of_shards(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() == 0 || b.dim() == 0 || (a.dim() <= 2 && b.dim() <= 2))
    return at::native::matmul(a, b);
  const bool torn = breaks_sharded_dim(a, a.dim() - 1) || breaks_sharded_dim(b, b.dim() - 1);
  if (!torn && a.dim() > 2 && b.dim() > 2) return at::native::matmul(a, b);
  // Whether libtorch folds batch dims into rows depends on who requires gradients, which a rank
  // alone may not.
  if (!torn && a.dim() > 2) return of_rows(a, b);
  // Batch dims are aligned at the end; those of size 1 that are broadcast are removed first.
  const std::int64_t batches = std::max(a.dim(), b.dim()) - 2;
  const auto prepare = [&](const at::Tensor& t, const at::Tensor& other, Indices& labels) {
    at::Tensor s = t;
    const std::int64_t own = std::max<std::int64_t>(t.dim() - 2, 0), others = other.dim() - 2;
    for (std::int64_t d = 0, at = 0; d < own; ++d) {
      const std::int64_t label = batches - own + d, o = label - (batches - others);
      if (t.size(d) == 1 && o >= 0 && other.size(o) != 1) {
        s = s.squeeze(at);
      } else {
        labels.push_back(label);
        ++at;
      }
    }
    return s;
  };
  // A batch dim of size 1 on one side alone, which the other does not have, is in the result; so is
  // every other one.
  Indices la, lb, lo = numbers_below(batches);
  const at::Tensor x = prepare(a, b, la), y = prepare(b, a, lb);
  if (a.dim() > 1) la.push_back(batches), lo.push_back(batches);
  la.push_back(batches + 1);
  lb.push_back(batches + 1);
  if (b.dim() > 1) lb.push_back(batches + 2), lo.push_back(batches + 2);
  return contract(x, y, la, lb, lo);
}

at::Tensor contract(const at::Tensor& a, const at::Tensor& b, const Indices& of_a,
                    const Indices& of_b, const Indices& of_result) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tessera::contract", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                            at::IntArrayRef)>();
  return op.call(a, b, of_a, of_b, of_result);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("contract(Tensor a, Tensor b, int[] of_a, int[] of_b, int[] of_result) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("contract", on_plain); }
TORCH_LIBRARY_IMPL(tessera, Autograd, m) { m.impl("contract", with_autograd); }

}  // namespace tessera::detail
