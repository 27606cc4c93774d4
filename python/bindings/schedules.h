#pragma once
// Pipeline schedules, what they cost and when they run, as Python holds them.

#include <torch/custom_class.h>

#include <utility>

#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/simulate.h"

namespace tessera::python {

struct PySchedule : torch::CustomClassHolder {
  explicit PySchedule(PipelineSchedule s) : schedule(std::move(s)) {}
  PipelineSchedule schedule;
};
using SchedulePtr = c10::intrusive_ptr<PySchedule>;

struct PyCosts : torch::CustomClassHolder {
  explicit PyCosts(PipelineCosts c) : costs(std::move(c)) {}
  PipelineCosts costs;
};
using CostsPtr = c10::intrusive_ptr<PyCosts>;

/// With its schedule, without which it says nothing.
struct PyTimeline : torch::CustomClassHolder {
  PyTimeline(PipelineSchedule s, Timeline t) : schedule(std::move(s)), timeline(std::move(t)) {}
  PipelineSchedule schedule;
  Timeline timeline;
};
using TimelinePtr = c10::intrusive_ptr<PyTimeline>;

}  // namespace tessera::python
