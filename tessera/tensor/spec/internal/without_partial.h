#pragma once
// without_partial: a spec with Replicate in place of Partial.

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

inline ShardSpec without_partial(const ShardSpec& spec) {
  auto placements = spec.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return spec.with_placements(placements);
}

}  // namespace tessera::detail
