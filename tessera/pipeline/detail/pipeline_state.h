#pragma once
// What a Pipeline holds.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/pipeline/detail/plan.h"
#include "tessera/pipeline/detail/step_run.h"
#include "tessera/pipeline/pipeline.h"

namespace tessera {

namespace detail {

/// Parameters that stages of several ranks share.
class TiedParameters {
 public:
  TiedParameters() = default;
  /// Collective over the pipeline's group: finds who shares what, and makes the values those of the
  /// first position that holds one. Throws InvalidArgument on every rank where shapes differ, or
  /// how they are sharded.
  explicit TiedParameters(const PipelinePlan& plan);
  /// Before a step: gradients of earlier steps count once, on the first position.
  void begin() const;
  /// After the step's backwards, on all positions that hold one: the sum becomes the gradient of
  /// each.
  void sum(const PipelinePlan& plan) const;
  /// Of this rank, those that are the same parameter as one of an earlier position, or of this one.
  std::vector<at::Tensor> repeated() const;

 private:
  struct Tie {
    std::vector<at::Tensor> mine;
    /// Global ranks.
    std::vector<int> ranks;
    bool first = false;
  };
  std::vector<Tie> ties_;
};

}  // namespace detail

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
