#pragma once
// What a call needs that no plan in the cache fits: its rule is asked, and the answer is checked
// against the call and made ready to run.

#include <ATen/core/ivalue.h>

#include "tessera/tensor/dispatch/plan_cache.h"

namespace tessera::detail {

/// The plan of a call of `info` with these arguments, whose sharded tensors `scan` has seen. Looks
/// at specs, dtypes and numbers alone, never at values, so that it is the same on all ranks, also
/// where it throws: NoRuleError where no rule covers the call, ShardingError where an argument
/// would have to change its placement to be written to, RuleError where the rule is wrong, and
/// what the operator itself throws for such arguments. Sets `asked_for_numbers` if the rule looked
/// at a floating-point argument: the plan holds for that number alone.
ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers);

}  // namespace tessera::detail
