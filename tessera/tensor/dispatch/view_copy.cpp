#include "tessera/tensor/dispatch/view_copy.h"

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

void ViewCopy::write_back() {
  const LocalCallGuard guard;
  at::Tensor part = whole;
  if (base_spec.has_partial() && !whole_spec.has_partial()) {
    part = redistribute_local(whole, whole_spec, base_spec);  // parts of the value again
  } else {
    for (int d = 0; d < base_spec.dims(); ++d) {
      part = part.narrow(d, base_spec.local_offset()[d] - whole_spec.local_offset()[d],
                         base_spec.local_shape()[d]);
    }
  }
  base.copy_(part);
  ++written;
  if (parent) parent->write_back();
}

void ViewCopy::require_fresh(const std::string& op) const {
  if (version.enabled() && version.current_version() - seen > written) {
    throw ShardingError(
        concat(op, " is given a view of ", base_spec,
               " that had to be copied, and the base has changed since. Take the view again."));
  }
  if (parent) parent->require_fresh(op);
}

}  // namespace tessera::detail
