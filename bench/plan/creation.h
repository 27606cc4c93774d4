#pragma once
// What it costs one rank to make its groups, in a small world and in a large one.

#include "harness.h"

namespace tessera::bench {

void group_creation(Report& report);

}  // namespace tessera::bench
