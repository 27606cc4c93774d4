#pragma once
// A schedule made for what the stages were measured to cost.
//
//   // 8 stages on 4 ranks, as a V; no rank may hold more than 10 activations.
//   const auto costs = PipelineCosts::uniform(8, 1.0, 1.5, 0.7, 0.02);
//   ListScheduleOptions options;
//   options.memory_limit = {10};
//   PipelineSchedule s = list_schedule(v_placement(4), 16, costs, options);
//   simulate(s, costs).makespan / makespan_bound(s.placement, 16, costs).makespan;   // 1: the best

#include <vector>

#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"

namespace tessera {

struct ListScheduleOptions {
  /// The most that each rank may hold, in the unit of StageCosts::activation. Empty: no limit; one
  /// value: of every rank.
  std::vector<double> memory_limit = {};
  /// Whether I and W may be apart; stages that recompute are never split.
  bool split_backward = true;
  /// It stops searching at this many times the bound.
  double target = 1.0;
  /// The most rules that are tried, and the most changes to the best of what they made. Large
  /// schedules have fewer: each of the two places 3 million actions at most (some seconds).
  int tries = 1000, improvements = 1000;
};

/// The shortest schedule found, of those that keep to the limits: first the known ones that there
/// are for this placement (so that it is never worse than these), then passes of list scheduling
/// with different rules, in each of which every free rank takes the best of what is ready, then
/// changes to the best of these. Of equally short ones, the one with the least memory. The result
/// is compute alone (see lower()), is valid, and the same each time in one build; where ranks may
/// have measured other times, one makes it and the others get it (to_csv()). Throws InvalidArgument
/// as ranks_of() and PipelineCosts::check(), and where a rank's limit does not hold one micro-batch
/// in all its stages.
PipelineSchedule list_schedule(const std::vector<int>& placement, int micro_batches,
                               const PipelineCosts& costs, const ListScheduleOptions& options = {});

}  // namespace tessera
