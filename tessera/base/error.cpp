#include "tessera/base/error.h"

namespace tessera {

// Out of line, so that each type is defined once and can be caught across shared libraries.
Error::Error(const std::string& what) : std::runtime_error(what) {}

}  // namespace tessera
