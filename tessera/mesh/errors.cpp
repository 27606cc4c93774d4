#include "tessera/mesh/errors.h"

namespace tessera {

// Defined here, so that each has one type information in the library and can be caught across
// shared objects.

}  // namespace tessera
