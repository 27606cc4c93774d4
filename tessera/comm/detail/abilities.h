#pragma once
// What a backend says about the reductions it does by itself. A backend of ours derives from this beside c10d::Backend; the group asks by
// dynamic_cast once, when it is made.

#include <c10/core/ScalarType.h>

#include "tessera/comm/types.h"

namespace tessera::detail {

/// Its reduce() leaves the tensors of the ranks that are not the root as they are.
class ReducingBackend {
 public:
  virtual ~ReducingBackend() = default;
  /// True if all-reduce, reduce and reduce-scatter of this dtype and operation are done by the backend exactly as types.h promises (NaN of any rank
  /// propagates, bool is and / or for min / max, half and bfloat16 are accumulated in float32). Where it is false the group composes the result
  /// itself.
  virtual bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const = 0;
  /// True if data of this dtype can be given to the backend as it is; else the group passes its bytes as uint8.
  virtual bool moves(c10::ScalarType dtype) const = 0;
};

}  // namespace tessera::detail
