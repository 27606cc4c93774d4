#include "tessera/data/errors.h"

namespace tessera {}  // namespace tessera
