#pragma once
// Guards of what runs below autograd. Autograd and autocast have already run on the sharded tensor.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::detail {

/// Nothing is recorded. Autocast stays as it is: it has cast the arguments of an operator that it
/// knows, and then sees nothing of what the operator calls; what one that it does not know is made
/// of it casts, as on one process.
class BelowAutogradGuard {
 public:
  BelowAutogradGuard() : exclude_(c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

/// Calls on locals go straight to the device's own kernels.
class LocalCallGuard {
 public:
  LocalCallGuard()
      : exclude_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                 c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace tessera::detail
