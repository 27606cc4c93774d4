#include "tessera/config/errors.h"

namespace tessera {

// Defined here, so that it has one type information and can be caught across shared objects.

}  // namespace tessera
