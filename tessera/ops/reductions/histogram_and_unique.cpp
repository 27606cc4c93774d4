// Results whose shape or values depend on all elements at once: the inputs are gathered. So are
// values that are read by the host.

#include "tessera/ops/rules/detail/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::histogram_and_unique_rules {

namespace {

const AtStart registered([] {
  for (const char* op :
       {"aten::_local_scalar_dense", "aten::median", "aten::nanmedian", "aten::histc",
        "aten::bincount", "aten::histogram", "aten::_histogramdd_bin_edges",
        "aten::_histogramdd_from_bin_cts", "aten::_histogramdd_from_bin_tensors", "aten::_unique",
        "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
        "aten::unique_dim_consecutive", "aten::segment_reduce", "aten::_segment_reduce_backward",
        "aten::hash_tensor"})
    register_rule(op, on_gathered);
});

}  // namespace

}  // namespace tessera::detail::histogram_and_unique_rules
