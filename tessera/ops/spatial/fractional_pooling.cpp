// Fractional pooling: the windows of each sample are drawn separately, so samples may be sharded.

#include "tessera/ops/rules/detail/empty_shards.h"
#include "tessera/ops/rules/detail/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::fractional_pooling_rules {

namespace {

const AtStart registered([] {
  for (const char* op :
       {"aten::fractional_max_pool2d", "aten::fractional_max_pool3d",
        "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward"})
    register_rule(op, guarded(per_sample));
});

}  // namespace

}  // namespace tessera::detail::fractional_pooling_rules
