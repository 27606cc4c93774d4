#pragma once
// Makes the plan of a call that no plan in the cache fits: asks the operator's rule, checks the
// answer against the call, and prepares it to run.

#include <ATen/core/ivalue.h>

#include "tessera/tensor/dispatch/internal/plan_cache.h"

namespace tessera::detail {

/// The plan of a call of `info` with these arguments, whose sharded tensors `scan` has found. Looks
/// at specs, dtypes and numbers alone, never at values, so that it is the same on all ranks, also
/// if it throws: NoRuleError if no rule covers the call, ShardingError if an argument would have to
/// change its placement to be written to, RuleError if the rule is wrong, and what the operator
/// itself throws for such arguments. Sets `asked_for_numbers` if the rule looked at a
/// floating-point argument: the plan is valid for that number alone.
ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers);

}  // namespace tessera::detail
