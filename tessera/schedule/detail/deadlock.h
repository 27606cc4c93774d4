#pragma once
// Ranks that wait for each other, found by trying the schedule out.

#include <vector>

#include "tessera/schedule/detail/positions.h"
#include "tessera/schedule/validate.h"

namespace tessera::detail {

/// A fault for each cycle of waiting ranks, at the one of the lowest rank. What is missing is taken
/// to be there, so that a cycle is one of what the lists hold. `lowered`: values cross ranks by
/// sends and receives only.
std::vector<ScheduleFault> find_deadlocks(const PipelineSchedule& schedule, const Positions& at,
                                          bool lowered, SendMode sends);

}  // namespace tessera::detail
