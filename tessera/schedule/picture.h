#pragma once
// A schedule drawn on a time axis.
//
//   const PipelineSchedule s = schedule_1f1b(4, 8);
//   std::ofstream("1f1b.svg") << visualize_schedule(s, simulate(s, PipelineCosts::uniform(4)));

#include <string>

#include "tessera/schedule/simulate.h"

namespace tessera {

/// A row for each rank, a box for each compute action (a colour for each kind, a lighter one for
/// the stages after the rank's first, the micro-batch's number where there is room), gathers and
/// reductions as a line below, what each rank holds at most, and the share of time in which ranks
/// wait. Self-contained SVG, to scale. Throws InvalidArgument for the timeline of another schedule,
/// and for more than 200,000 actions.
std::string visualize_schedule(const PipelineSchedule& schedule, const Timeline& timeline);

}  // namespace tessera
