#include "tessera/data/errors.h"

namespace tessera {

FileError::~FileError() = default;
VariableError::~VariableError() = default;
RangeError::~RangeError() = default;

}  // namespace tessera
