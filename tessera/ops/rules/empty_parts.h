#pragma once
// guarded(): kernels that refuse empty channels or samples, or divide by their number, are not
// called on an empty part.

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// The rule's plan; where this rank's part of some input is empty and the input is not, the results
/// are made without the operator: nothing, or the zero that an empty part contributes to a sum. For
/// operators whose every result is sharded with, or summed over, what is empty.
Rule guarded(Rule rule);

}  // namespace tessera::detail
