#include "tessera/tensor/dispatch/detail/make_plan.h"

#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {
namespace {

struct Summand {
  int argument;
  ShardSpec spec, summed;
};

// One read of the tensor. A sum of finite numbers that overflows counts as infinite: then the sum
// of the summands is computed first without need.
bool finite(const at::Tensor& t) {
  if (!t.defined() || !t.is_cpu() || t.numel() == 0) return true;
  const at::Tensor real = t.is_complex() ? at::view_as_real(t.resolve_conj()) : t;
  return std::isfinite(at::sum(real, at::toOpMathType(real.scalar_type())).item<double>());
}

// True if a factor is sharded along an axis of which the tensor is Partial: then it is added to the
// product of the factors, not multiplied by them, and the ranks of the axis see other values of
// theirs.
bool is_added(const ShardSpec& partial, const std::vector<ShardSpec>& factors) {
  for (std::size_t a = 0; a < partial.placements().size(); ++a)
    if (partial.placements()[a].is_partial() &&
        std::ranges::any_of(factors,
                            [&](const ShardSpec& f) { return f.placements()[a].is_shard(); }))
      return true;
  return false;
}

// True if this rank's result counts: of equal results a mean is the same, a sum needs one of them.
bool keeps_result(const ShardSpec& spec) {
  for (std::size_t a = 0; a < spec.placements().size(); ++a) {
    const Placement& p = spec.placements()[a];
    if (p.is_partial() && !p.is_partial(ReduceOp::Kind::avg) &&
        context_of(spec)->group(static_cast<int>(a)).rank() != 0)
      return false;
  }
  return true;
}

}  // namespace

LocalFunction with_finite_factors(const OpCall& call, const Plan& plan, LocalFunction local) {
  if (!plan.linear) return local;
  std::vector<Summand> summands;
  std::vector<int> factors;
  std::vector<ShardSpec> of_factors;
  for (std::size_t i = 0; i < call.tensors().size(); ++i) {
    const TensorInfo& t = call.tensors()[i];
    const ShardSpec& spec = i < plan.inputs.size() && plan.inputs[i] ? *plan.inputs[i] : t.spec;
    if (t.element >= 0) return local;
    if (spec.has_partial()) {
      summands.push_back({t.argument, spec, without_partial(spec)});
    } else if (at::isFloatingType(t.dtype) || at::isComplexType(t.dtype)) {
      factors.push_back(t.argument);
      of_factors.push_back(spec);
    }
  }
  std::erase_if(summands, [&](const Summand& s) { return is_added(s.spec, of_factors); });
  if (summands.empty() || factors.empty()) return local;
  // Inputs may be Partial along different axes: the result is along each of them.
  const bool keeps =
      std::ranges::all_of(summands, [](const Summand& s) { return keeps_result(s.spec); });
  return [local = std::move(local), summands, factors, keeps, in_place = call.in_place()](
             const c10::OperatorHandle& op, torch::jit::Stack a) {
    const auto run = [&](torch::jit::Stack with) {
      if (local) return local(op, std::move(with));
      op.callBoxed(with);
      return with;
    };
    const bool linear = std::ranges::all_of(
        factors, [&](int i) { return !a[i].isTensor() || finite(a[i].toTensor()); });
    if (linear) return run(std::move(a));
    const at::Tensor target = in_place ? a[0].toTensor() : at::Tensor();
    for (const Summand& s : summands) {
      const at::Tensor mine = a[s.argument].toTensor();
      a[s.argument] = at::empty_like(mine).copy_(redistribute_local(mine, s.spec, s.summed));
    }
    torch::jit::Stack made = run(std::move(a));
    for (c10::IValue& v : made)
      if (!keeps && v.isTensor() && v.toTensor().defined()) v = at::zeros_like(v.toTensor());
    if (in_place) made[0] = target.copy_(made[0].toTensor());
    return made;
  };
}

}  // namespace tessera::detail
