#include "tessera/comm/group/types.h"

namespace tessera {

std::string to_string(ReduceOp::Kind kind) {
  static constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "premultiplied"};
  return kNames[static_cast<std::size_t>(kind)];
}

}  // namespace tessera
