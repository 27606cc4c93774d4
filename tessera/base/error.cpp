#include "tessera/base/error.h"

namespace tessera {

// The classes of errors have no function that is defined in one library alone, so each library that
// throws has their type information. Where a loader keeps these apart (RTLD_LOCAL), libstdc++ tells
// types by their names, and what one library throws is caught by type in another.
Error::Error(const std::string& what) : std::runtime_error(what) {}

}  // namespace tessera
