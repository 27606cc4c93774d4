#include "tessera/comm/group/types.h"

namespace tessera {

CommError::~CommError() = default;
TimeoutError::~TimeoutError() = default;
PeerLostError::~PeerLostError() = default;
PeerFailedError::~PeerFailedError() = default;
MismatchError::~MismatchError() = default;

std::string to_string(ReduceOp::Kind kind) {
  switch (kind) {
    case ReduceOp::Kind::sum:
      return "sum";
    case ReduceOp::Kind::avg:
      return "avg";
    case ReduceOp::Kind::product:
      return "product";
    case ReduceOp::Kind::min:
      return "min";
    case ReduceOp::Kind::max:
      return "max";
    case ReduceOp::Kind::premultiplied:
      return "premultiplied";
  }
  return "unknown";
}

}  // namespace tessera
