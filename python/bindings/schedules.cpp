// Pipeline schedules: generators by name, tables, passes, the validator, the simulator, pictures.

#include "schedules.h"

#include <ATen/core/List.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "handles.h"
#include "library.h"
#include "tessera/base/text.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

namespace tessera::python {

namespace {

using Texts = Names;

int counted(std::int64_t number, const char* what) {
  if (number < std::numeric_limits<int>::min() || number > std::numeric_limits<int>::max())
    throw InvalidArgument(what, " is ", number, ", beyond what a schedule counts");
  return static_cast<int>(number);
}

SchedulePtr held(PipelineSchedule schedule) {
  return c10::make_intrusive<PySchedule>(std::move(schedule));
}

const Texts& schedule_names() {
  static const Texts names = {"gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v"};
  return names;
}

// Of a generator. Without `chunks`: what the generator has.
SchedulePtr schedule_named(const std::string& name, std::int64_t given_ranks,
                           std::optional<std::int64_t> chunks, std::int64_t given_micro_batches) {
  const int ranks = counted(given_ranks, "the number of ranks");
  const int micro_batches = counted(given_micro_batches, "the number of micro-batches");
  const auto holds = [&](int stages) {
    if (chunks && *chunks != stages)
      throw InvalidArgument("schedule '", name, "' has chunks = ", stages,
                            " (stages on each rank), and ", *chunks, " are asked for");
  };
  if (name == "gpipe")
    return held(schedule_gpipe(loop_placement(ranks, counted(chunks.value_or(1), "chunks")),
                               micro_batches));
  if (name == "interleaved")
    return held(schedule_interleaved(ranks, counted(chunks.value_or(2), "chunks"), micro_batches));
  if (name == "zero_bubble_v") {
    holds(2);
    return held(schedule_zero_bubble_v(ranks, micro_batches));
  }
  if (name == "1f1b" || name == "zero_bubble_h1") {
    holds(1);
    return held(name == "1f1b" ? schedule_1f1b(ranks, micro_batches)
                               : schedule_zero_bubble_h1(ranks, micro_batches));
  }
  throw InvalidArgument("there is no schedule '", name, "'; there are ", list(schedule_names()),
                        ", Schedule.gpipe(placement, ...) and Schedule.for_costs(...)");
}

/// forward, input_gradient, weight_gradient, backward, recompute, activation, kept_for_weight,
/// working, gather, reduce.
using StageTuple = std::tuple<double, double, double, std::optional<double>, bool, double,
                              std::optional<double>, double, double, double>;
StageCosts stage_costs(const StageTuple& t) {
  const auto& [forward, input, weight, backward, recompute, activation, kept, working, gather,
               reduce] = t;
  return {forward, input, weight, backward, recompute, activation, kept, working, gather, reduce};
}
StageTuple stage_tuple(const StageCosts& c) {
  return {c.forward,    c.input_gradient,  c.weight_gradient, c.backward, c.recompute,
          c.activation, c.kept_for_weight, c.working,         c.gather,   c.reduce};
}

ValidateOptions validate_options(bool backward, const std::string& sends,
                                 const std::vector<double>& memory_limit,
                                 const std::optional<CostsPtr>& costs) {
  ValidateOptions options{.backward = backward, .memory_limit = memory_limit};
  if (sends == "buffered")
    options.sends = SendMode::buffered;
  else if (sends != "rendezvous")
    throw InvalidArgument("sends are 'rendezvous' or 'buffered', not '", sends, "'");
  if (costs) options.costs = (*costs)->costs;
  return options;
}

/// kind, rank, position, action, why, text.
using FaultTuple =
    std::tuple<std::string, std::int64_t, std::int64_t, std::string, std::string, std::string>;
std::vector<FaultTuple> faults_of(const PipelineSchedule& schedule,
                                  const ValidateOptions& options) {
  std::vector<FaultTuple> all;
  for (const ScheduleFault& f : validate(schedule, options))
    all.emplace_back(to_string(f.kind), f.rank, f.position,
                     f.action ? to_string(*f.action) : std::string(), f.why, f.text());
  return all;
}

std::vector<Texts> rows_of(const PipelineSchedule& schedule) {
  std::vector<Texts> rows;
  for (const auto& row : schedule.actions) {
    rows.emplace_back();
    for (const PipelineAction& action : row) rows.back().push_back(to_string(action));
  }
  return rows;
}

std::vector<std::vector<std::tuple<double, double>>> spans_of(const Timeline& timeline) {
  std::vector<std::vector<std::tuple<double, double>>> all;
  for (const auto& row : timeline.spans) {
    all.emplace_back();
    for (const ActionSpan& span : row) all.back().emplace_back(span.start, span.end);
  }
  return all;
}

SchedulePtr lowered(const SchedulePtr& self, const c10::List<bool>& sharded,
                    std::int64_t gathered_at_once, const c10::List<bool>& reduced,
                    const std::optional<CostsPtr>& costs) {
  LowerOptions options{sharded.vec(), counted(gathered_at_once, "gathered_at_once"), reduced.vec()};
  if (costs) options.costs = (*costs)->costs;
  return held(lower(self->schedule, options));
}

SchedulePtr made_for(const Numbers& placement, std::int64_t micro_batches, const CostsPtr& costs,
                     const std::vector<double>& memory_limit, bool split_backward, double target,
                     std::int64_t tries, std::int64_t improvements) {
  return held(list_schedule(to_ints(placement), counted(micro_batches, "micro_batches"),
                            costs->costs,
                            {memory_limit, split_backward, target, counted(tries, "tries"),
                             counted(improvements, "improvements")}));
}

void register_values(Library& library) {
  library.class_<PyCosts>("PipelineCosts")
      .def(torch::init([](const std::vector<StageTuple>& stages,
                          const std::vector<double>& communication,
                          const std::vector<double>& sizes) {
        PipelineCosts costs{{}, communication, sizes};
        for (const StageTuple& stage : stages) costs.stages.push_back(stage_costs(stage));
        return c10::make_intrusive<PyCosts>(std::move(costs));
      }))
      .def("stages",
           [](const CostsPtr& self) {
             std::vector<StageTuple> all;
             for (const StageCosts& stage : self->costs.stages) all.push_back(stage_tuple(stage));
             return all;
           })
      .def("communication", [](const CostsPtr& self) { return self->costs.communication; })
      .def("sizes", [](const CostsPtr& self) { return self->costs.sizes; });
  library.class_<PyTimeline>("Timeline")
      .def("makespan", [](const TimelinePtr& self) { return self->timeline.makespan; })
      .def("busy", [](const TimelinePtr& self) { return self->timeline.busy; })
      .def("peak", [](const TimelinePtr& self) { return self->timeline.peak; })
      .def("work", [](const TimelinePtr& self) { return self->timeline.work(); })
      .def("bubble", [](const TimelinePtr& self) { return self->timeline.bubble(); })
      .def("spans", [](const TimelinePtr& self) { return spans_of(self->timeline); })
      .def("text",
           [](const TimelinePtr& self, double unit, std::int64_t columns) {
             return timeline_text(self->schedule, self->timeline, unit,
                                  counted(columns, "columns"));
           })
      .def("svg", [](const TimelinePtr& self) {
        return visualize_schedule(self->schedule, self->timeline);
      });
}

void register_schedule(Library& library) {
  library.class_<PySchedule>("Schedule")
      .def("name", [](const SchedulePtr& self) { return self->schedule.name; })
      .def("placement", [](const SchedulePtr& self) { return from_ints(self->schedule.placement); })
      .def("micro_batches",
           [](const SchedulePtr& self) -> std::int64_t { return self->schedule.micro_batches; })
      .def("ranks", [](const SchedulePtr& self) -> std::int64_t { return self->schedule.ranks(); })
      .def("stages_of",
           [](const SchedulePtr& self, std::int64_t rank) {
             return from_ints(self->schedule.stages_of(counted(rank, "rank")));
           })
      .def("actions", [](const SchedulePtr& self) { return rows_of(self->schedule); })
      .def("text", [](const SchedulePtr& self) { return to_string(self->schedule); })
      .def("csv", [](const SchedulePtr& self) { return to_csv(self->schedule); })
      .def("same", [](const SchedulePtr& self,
                      const SchedulePtr& other) { return self->schedule == other->schedule; })
      .def("faults",
           [](const SchedulePtr& self, bool backward, const std::string& sends,
              const std::vector<double>& limit, const std::optional<CostsPtr>& costs) {
             return faults_of(self->schedule, validate_options(backward, sends, limit, costs));
           })
      .def("check",
           [](const SchedulePtr& self, bool backward, const std::string& sends,
              const std::vector<double>& limit, const std::optional<CostsPtr>& costs) {
             check(self->schedule, validate_options(backward, sends, limit, costs));
           })
      .def("simulate",
           [](const SchedulePtr& self, const CostsPtr& costs) {
             return c10::make_intrusive<PyTimeline>(self->schedule,
                                                    simulate(self->schedule, costs->costs));
           })
      .def("peak_memory",
           [](const SchedulePtr& self, const CostsPtr& costs) {
             return peak_memory(self->schedule, costs->costs);
           })
      .def("lowered", &lowered)
      .def("join_backward",
           [](const SchedulePtr& self, const c10::List<bool>& whole) {
             return held(join_backward(self->schedule, whole.vec()));
           })
      .def("merge_backward",
           [](const SchedulePtr& self, const CostsPtr& costs) {
             return held(merge_backward(self->schedule, costs->costs));
           })
      .def("forward_only",
           [](const SchedulePtr& self) { return held(forward_only(self->schedule)); });
}

}  // namespace

void register_schedules(Library& library) {
  register_values(library);
  register_schedule(library);
  library.def("schedule_names", [] { return schedule_names(); });
  library.def("schedule_named", &schedule_named);
  library.def("schedule_gpipe", [](const Numbers& placement, std::int64_t micro_batches) {
    return held(schedule_gpipe(to_ints(placement), counted(micro_batches, "micro_batches")));
  });
  library.def("list_schedule", &made_for);
  library.def("schedule_from_csv",
              [](const std::string& text) { return held(schedule_from_csv(text)); });
  library.def("schedule_from_table",
              [](const std::string& text, const Numbers& placement, std::int64_t micro_batches) {
                return held(schedule_from_table(text, to_ints(placement),
                                                counted(micro_batches, "micro_batches")));
              });
  library.def("loop_placement", [](std::int64_t ranks, std::int64_t chunks) {
    return from_ints(loop_placement(counted(ranks, "ranks"), counted(chunks, "chunks")));
  });
  library.def("v_placement", [](std::int64_t ranks, std::int64_t chunks) {
    return from_ints(v_placement(counted(ranks, "ranks"), counted(chunks, "chunks")));
  });
  // The makespan, the rank that it comes from, and the work.
  library.def("makespan_bound", [](const Numbers& placement, std::int64_t micro_batches,
                                   const CostsPtr& costs) {
    const MakespanBound bound =
        makespan_bound(to_ints(placement), counted(micro_batches, "micro_batches"), costs->costs);
    return std::tuple<double, std::int64_t, double>(bound.makespan, bound.rank, bound.work);
  });
  library.def("balanced_cuts", [](const std::vector<double>& costs, std::int64_t stages) {
    return from_ints(balanced_cuts(costs, counted(stages, "stages")));
  });
}

}  // namespace tessera::python
