#pragma once
// The job's store at ten thousand ranks: what the meeting, an agreement of all and the making of
// groups cost rank 0, which serves them.

#include "harness.h"

namespace tessera::bench {

void store_at_scale(Report& report);

}  // namespace tessera::bench
