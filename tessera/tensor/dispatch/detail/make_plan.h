#pragma once
// Makes the plan of a call that no plan in the cache fits: asks the operator's rule, checks the
// answer against the call, and prepares it to run.
//
// Dry runs: the results of an operator, and whether it accepts its arguments, determined without
// values. All that they look at is known to all ranks, so that an error is thrown on every rank,
// before anything is sent.
//
// Operators that are linear in a Partial input: what holds for finite numbers alone.
//
// Lists that an operator takes element by element, sharded tensors and plain ones mixed: those of
// an optimizer over a module of which a part is sharded.

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/plan_cache.h"
#include "tessera/tensor/dispatch/rule.h"

namespace torch {
class Library;
}  // namespace torch

namespace tessera::detail {

/// The plan of a call of `info` with these arguments, whose sharded tensors `scan` has found. Looks
/// at specs, dtypes and numbers alone, never at values, so that it is the same on all ranks, also
/// if it throws: NoRuleError if no rule covers the call, ShardingError if an argument would have to
/// change its placement to be written to, RuleError if the rule is wrong, and what the operator
/// itself throws for such arguments. Sets `asked_for_numbers` if the rule looked at a
/// floating-point argument: the plan is valid for that number alone.
ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers);

/// The outputs, as OpCall::outputs() returns them. nullopt: the operator has no meta kernel for the
/// arguments.
std::optional<std::vector<OutputInfo>> infer_outputs(const OpInfo& info,
                                                     const std::vector<c10::IValue>& arguments,
                                                     const std::vector<TensorInfo>& tensors);

/// Throws what the operator throws for tensors and numbers of these dtypes, which meta kernels do
/// not check: it is run on small tensors, and an error counts if other dtypes in their place make
/// it go away (otherwise the shapes were to blame). Does nothing for devices other than the CPU,
/// for random operators that take no generator, and for operators that are not libtorch's own.
void require_dtypes(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                    const std::vector<TensorInfo>& tensors, c10::Device device);

/// The local call of a plan with Plan::linear: `local`, or the operator itself if that is empty. If
/// another input is not finite (infinity times a summand of zero is NaN, and the sum may be another
/// number), the Partial inputs are summed up first and one rank of each axis keeps the result. The
/// ranks that sum up decide alike: they are those of the Partial axes, along which the plan makes
/// the other inputs replicated. Inputs on other devices than the CPU are taken for finite: to know,
/// the host would have to wait for them. Returns `local` for other plans.
LocalFunction with_finite_factors(const OpCall& call, const Plan& plan, LocalFunction local);

/// For an operator on lists (aten::_foreach_add, aten::_fused_adamw_) and lists of which some
/// elements are plain tensors throughout, others not: calls it for the ones and for the others, so
/// that what is plain stays plain, leaves the results on the stack, and returns true. Otherwise,
/// and for every other operator, does nothing.
bool run_plain_elements_apart(const OpInfo& info, torch::jit::Stack* stack);

/// Registers unboxed kernels of `name` ("aten::add.Tensor"), of the operators that training calls
/// most: they use the same plans, found without building a stack of boxed values. Returns false if
/// it has none. `info` must outlive the registration.
bool register_fast_kernels(const std::string& name, const std::shared_ptr<const OpInfo>& info,
                           torch::Library& below, torch::Library& above);

}  // namespace tessera::detail
