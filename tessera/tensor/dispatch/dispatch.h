#pragma once
// The entry into the dispatcher: the kernels of sharded tensors, registered for every operator.

namespace tessera::detail {

/// Registers the kernels on first use, and those of operators defined since. Called wherever a
/// sharded tensor is made. Throws NotAvailable if another library uses the dispatch key.
void ensure_registered();

}  // namespace tessera::detail
