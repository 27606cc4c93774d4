#include "tessera/mesh/errors.h"

namespace tessera {

// Defined here, so that each has one type information in the library and can be caught across
// shared objects.
GroupConfigError::~GroupConfigError() = default;
WorldSizeMismatch::~WorldSizeMismatch() = default;
UnsetSize::~UnsetSize() = default;
RepeatedName::~RepeatedName() = default;
UnknownName::~UnknownName() = default;
GroupCycle::~GroupCycle() = default;
OrthogonalityError::~OrthogonalityError() = default;
ViewMismatch::~ViewMismatch() = default;
MappingError::~MappingError() = default;

}  // namespace tessera
