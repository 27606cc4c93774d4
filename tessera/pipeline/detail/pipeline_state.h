#pragma once
// What a Pipeline holds.

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/pipeline/detail/plan.h"
#include "tessera/pipeline/detail/step_run.h"
#include "tessera/pipeline/detail/ties.h"
#include "tessera/pipeline/pipeline.h"

namespace tessera {

struct Pipeline::State {
  detail::PipelinePlan plan;
  detail::TiedParameters ties = {};
  std::uint64_t steps = 0;
  /// Of the last step, by action of this rank's row.
  std::vector<std::optional<ActionSpan>> spans = {};

  PipelineResult run(const PipelineBatch& batch, bool training, const PipelineStepOptions& options);
  PipelineResult finish(detail::StepRun& step, const detail::StepFacts& facts);
  /// Seconds of each compute action of a step with this schedule; nothing is reduced.
  std::vector<std::pair<PipelineAction, double>> time(const PipelineSchedule& schedule,
                                                      const PipelineBatch& batch);
  /// Seconds of a message from stage `s` to the next one; 0 where this rank has no part in it.
  double time_message(int s, int repeats) const;
};

}  // namespace tessera
