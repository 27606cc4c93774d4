#pragma once
// LocalCallGuard: calls on locals go straight to the device's own kernels. Autograd and autocast
// have already run on the sharded tensor.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::detail {

class LocalCallGuard {
 public:
  LocalCallGuard()
      : exclude_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                 c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace tessera::detail
