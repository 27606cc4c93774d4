#include "tessera/data/errors.h"

namespace tessera {

VariableError::~VariableError() = default;
RangeError::~RangeError() = default;

}  // namespace tessera
