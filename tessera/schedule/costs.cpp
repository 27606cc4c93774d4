#include "tessera/schedule/costs.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/text.h"

namespace tessera {
namespace {

void check_value(double value, const std::string& what) {
  if (!std::isfinite(value) || value < 0)
    throw InvalidArgument(what, " is ", value, "; it must be a finite number, 0 or above");
}

void check_count(std::size_t count, int expected, bool may_be_empty, const char* what) {
  if (count == static_cast<std::size_t>(expected) || (may_be_empty && count == 0)) return;
  throw InvalidArgument("costs of ", count, " ", what, "; the schedule has ", expected);
}

}  // namespace

PipelineCosts PipelineCosts::uniform(int stages, double forward, double input_gradient,
                                     double weight_gradient, double communication) {
  const StageCosts stage{forward, input_gradient, weight_gradient};
  PipelineCosts costs;
  costs.stages.assign(std::max(stages, 0), stage);
  if (communication != 0) costs.communication.assign(std::max(stages - 1, 0), communication);
  costs.check(stages, 0);
  return costs;
}

void PipelineCosts::check(int stage_count, int micro_batches) const {
  check_count(stages.size(), stage_count, false, "stages");
  check_count(communication.size(), std::max(stage_count - 1, 0), true, "edges between stages");
  check_count(sizes.size(), micro_batches, true, "micro-batches");
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const StageCosts& c = stages[s];
    const std::string of = concat(" of stage ", s);
    check_value(c.forward, "the forward time" + of);
    check_value(c.input_gradient, "the input gradient's time" + of);
    check_value(c.weight_gradient, "the weight gradient's time" + of);
    if (c.backward) check_value(*c.backward, "the backward time" + of);
    check_value(c.activation, "the activation" + of);
    if (c.kept_for_weight) {
      check_value(*c.kept_for_weight, "what is kept for the weight gradient" + of);
      if (*c.kept_for_weight > c.activation) {
        throw InvalidArgument(*c.kept_for_weight, " is kept for the weight gradient", of,
                              ", more than ", c.activation, ", its activation");
      }
    }
    check_value(c.working, "the working memory" + of);
    check_value(c.gather, "the gather's time" + of);
    check_value(c.reduce, "the reduction's time" + of);
  }
  for (const double value : communication) check_value(value, "a communication time");
  for (const double value : sizes) check_value(value, "a micro-batch's size");
}

double PipelineCosts::time(const PipelineAction& action) const {
  if (!is_compute(action.kind)) return 0;
  const StageCosts& c = stages[action.stage];
  const double again = c.recompute ? c.forward : 0;
  double time = c.forward;
  if (action.kind == ActionKind::input_gradient) time = c.input_gradient + again;
  if (action.kind == ActionKind::weight_gradient) time = c.weight_gradient + again;
  if (action.kind == ActionKind::backward)
    time = c.backward.value_or(c.input_gradient + c.weight_gradient + again);
  return time * size(action.micro_batch);
}

double PipelineCosts::travel(int from, int to, const std::vector<int>& placement) const {
  if (communication.empty() || placement[from] == placement[to]) return 0;
  return communication[std::min(from, to)];
}

double PipelineCosts::held_at_start(const PipelineAction& action) const {
  if (!is_compute(action.kind)) return 0;
  const StageCosts& c = stages[action.stage];
  return (action.kind == ActionKind::forward ? c.activation : c.working) * size(action.micro_batch);
}

double PipelineCosts::held_at_end(const PipelineAction& action) const {
  if (!is_compute(action.kind) || action.kind == ActionKind::forward) return 0;
  const StageCosts& c = stages[action.stage];
  const double kept = c.kept_for_weight.value_or(c.activation);
  double freed = c.activation;
  if (action.kind == ActionKind::input_gradient) freed = c.activation - kept;
  if (action.kind == ActionKind::weight_gradient) freed = kept;
  return -(freed + c.working) * size(action.micro_batch);
}

}  // namespace tessera
