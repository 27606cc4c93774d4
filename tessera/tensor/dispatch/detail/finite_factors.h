#pragma once
// Operators that are linear in a Partial input: what holds for finite numbers alone.

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// The local call of a plan with Plan::linear: `local`, or the operator itself if that is empty. If
/// another input is not finite (infinity times a summand of zero is NaN, and the sum may be another
/// number), the Partial inputs are summed up first and one rank of each axis keeps the result. The
/// ranks that sum up decide alike: they are those of the Partial axes, along which the plan makes
/// the other inputs replicated. Inputs on other devices than the CPU are taken for finite: to know,
/// the host would have to wait for them. Returns `local` for other plans.
LocalFunction with_finite_factors(const OpCall& call, const Plan& plan, LocalFunction local);

}  // namespace tessera::detail
