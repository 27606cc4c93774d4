#pragma once
// guarded(): for operators whose kernels refuse empty channels or samples, or divide by their
// number.

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// Returns a rule that plans as `rule` does, but does not call the operator on a rank whose shard
/// of an input is empty while the global input is not: the results there are made without it, empty
/// or, if they are Partial, zero. Only for operators whose every result is sharded with the empty
/// dim or summed over it.
Rule guarded(Rule rule);

}  // namespace tessera::detail
