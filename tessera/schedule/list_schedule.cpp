#include "tessera/schedule/list_schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "tessera/base/text.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/detail/dispatch.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

namespace tessera {
namespace {

using detail::DispatchRule;

// By all passes of one kind.
constexpr double kMostPlaced = 3e6;

// Keeps the best of what it is shown.
struct Best {
  const PipelineCosts& costs;
  std::vector<double> limits;
  // A makespan that need not be shortened.
  double wanted;
  double makespan = std::numeric_limits<double>::infinity(), memory = makespan;
  PipelineSchedule schedule = {};

  void show(PipelineSchedule shown) {
    const Timeline timeline = simulate(shown, costs);
    for (std::size_t r = 0; r < limits.size(); ++r)
      if (timeline.peak[r] > limits[r] * (1 + 1e-9)) return;
    const double holds = *std::ranges::max_element(timeline.peak);
    const double nothing = 1e-9 * timeline.makespan;
    const bool shorter = timeline.makespan < makespan - nothing;
    if (shorter || (timeline.makespan < makespan + nothing && holds < memory)) {
      makespan = timeline.makespan;
      memory = holds;
      schedule = std::move(shown);
    }
  }
  bool enough() const { return makespan <= wanted; }
};

std::vector<PipelineSchedule> known_schedules(const std::vector<int>& placement, int micro_batches,
                                              bool split) {
  std::vector<PipelineSchedule> known;
  const int ranks = ranks_of(placement), stages = static_cast<int>(placement.size());
  const int chunks = stages / ranks;
  if (placement == loop_placement(ranks, std::max(chunks, 1))) {
    known.push_back(schedule_interleaved(ranks, chunks, micro_batches));
    if (chunks == 1 && split) known.push_back(schedule_zero_bubble_h1(ranks, micro_batches));
  } else if (placement == v_placement(ranks) && split) {
    known.push_back(schedule_zero_bubble_v(ranks, micro_batches));
  }
  known.push_back(schedule_gpipe(placement, micro_batches));
  return known;
}

// The rules in the order in which they are tried: those that are best most often first.
std::vector<DispatchRule> rules() {
  using First = DispatchRule::First;
  std::vector<DispatchRule> rules;
  for (const double patience : {0.0, 0.5, 1.0}) {
    for (const double weight_patience : {0.0, 0.5, 0.25, 1.0}) {
      for (const First first : {First::gradients, First::forwards, First::alternate}) {
        for (const bool deep_gradients : {false, true})
          for (const bool deep_forwards : {true, false})
            rules.push_back({first, deep_forwards, deep_gradients, patience, weight_patience});
      }
    }
  }
  return rules;
}

// Limits that are tried beside the given ones: with less memory the ranks go on in step.
std::vector<std::vector<double>> tried_limits(const std::vector<double>& least,
                                              const std::vector<double>& given) {
  std::vector<std::vector<double>> tried;
  const auto ranks = static_cast<double>(least.size());
  for (const double share : {1.0, 1.25, 1.5, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    std::vector<double> limits;
    for (std::size_t r = 0; r < least.size(); ++r) {
      // Nothing held and no end of memory make no number.
      const double wanted =
          std::isinf(share) ? share : std::max(least[r] * ranks * share, least[r]);
      limits.push_back(std::min(wanted, given[r]));
    }
    if (std::ranges::find(tried, limits) == tried.end()) tried.push_back(limits);
  }
  return tried;
}

std::vector<double> given_limits(const std::vector<double>& least,
                                 const ListScheduleOptions& options) {
  std::vector<double> given(least.size(), std::numeric_limits<double>::infinity());
  if (options.memory_limit.size() == 1) given.assign(least.size(), options.memory_limit[0]);
  if (options.memory_limit.size() == least.size()) given = options.memory_limit;
  if (options.memory_limit.size() > 1 && options.memory_limit.size() != least.size()) {
    throw InvalidArgument(options.memory_limit.size(),
                          " memory limits; give one, or one for each of the ", least.size(),
                          " ranks");
  }
  for (std::size_t r = 0; r < least.size(); ++r) {
    if (!(given[r] >= least[r] * (1 - 1e-9))) {
      throw InvalidArgument("rank ", r, " may hold ", given[r],
                            ", and one micro-batch in all its stages takes ", least[r],
                            ": raise the limit, make micro-batches smaller or recompute");
    }
  }
  return given;
}

PipelineSchedule as_schedule(const detail::DispatchProblem& problem, detail::Dispatched made) {
  return {"", problem.placement, problem.micro_batches, std::move(made.actions)};
}

// When each action of a schedule starts, in the order of Dispatched::starts.
std::vector<double> starts_of(const PipelineSchedule& schedule, const Timeline& timeline) {
  const std::size_t cells = static_cast<std::size_t>(schedule.stages()) * schedule.micro_batches;
  std::vector<double> starts(3 * cells, 0.0);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const PipelineAction& a = schedule.actions[rank][i];
      const ActionSpan span = timeline.spans[rank][i];
      const std::size_t cell =
          static_cast<std::size_t>(a.stage) * schedule.micro_batches + a.micro_batch;
      if (a.kind == ActionKind::forward) starts[cell] = span.start;
      if (makes_input_gradient(a.kind)) starts[cells + cell] = span.start;
      // Half of a whole backward comes right behind the other.
      if (makes_weight_gradient(a.kind)) starts[2 * cells + cell] = span.end;
    }
  }
  return starts;
}

// Passes whose priorities are when the best schedule so far does things, disturbed: all of it or a
// part of the time, by less or more than the time of an action. What is not longer is gone on with.
void improve(Best& best, const detail::DispatchProblem& problem, const std::vector<double>& limits,
             int improvements) {
  constexpr std::array<double, 5> kScales = {0.3, 0.8, 2.0, 5.0, 12.0};
  // Raw output of the engine alone: the same numbers everywhere, uniform in [0, 1).
  std::mt19937_64 engine(1);
  const auto uniform = [&] { return static_cast<double>(engine() >> 11) * 0x1p-53; };
  const auto coin = [&] { return engine() % 2 == 0; };
  std::vector<double> order = starts_of(best.schedule, simulate(best.schedule, problem.costs));
  double length = best.makespan;
  const double action = length / (3.0 * problem.micro_batches);
  for (int n = 0; n < improvements && !best.enough(); ++n) {
    std::vector<double> disturbed = order;
    const double scale = action * kScales[engine() % kScales.size()];
    const double share = coin() ? 1.0 : 0.1;
    const double from = coin() ? uniform() * length : 0.0;
    const double to = from > 0 ? from + uniform() * length : length;
    for (double& time : disturbed) {
      if (time < from || time > to || uniform() >= share) continue;
      time += scale * (2 * uniform() - 1);
    }
    const double eagerness = coin() ? 0.0 : coin() ? 1.0 : uniform();
    detail::Dispatched made = detail::dispatch(problem, limits, disturbed, eagerness);
    if (made.makespan > length * (1 + 1e-9)) continue;
    order = made.starts;
    if (made.makespan >= length * (1 - 1e-9)) continue;
    length = made.makespan;
    best.show(as_schedule(problem, std::move(made)));
  }
}

}  // namespace

PipelineSchedule list_schedule(const std::vector<int>& placement, int micro_batches,
                               const PipelineCosts& costs, const ListScheduleOptions& options) {
  const int stages = static_cast<int>(placement.size());
  const MakespanBound bound = makespan_bound(placement, micro_batches, costs);
  if (options.tries < 1 || options.improvements < 0 || !(options.target >= 1)) {
    throw InvalidArgument(options.tries, " tries and ", options.improvements,
                          " improvements with a target of ", options.target,
                          " times the bound; tries and target must be at least 1");
  }
  detail::DispatchProblem problem{placement, micro_batches, costs, {}};
  for (const StageCosts& stage : costs.stages)
    problem.whole.push_back(stage.recompute || !options.split_backward);
  const std::vector<double> least = detail::least_memory(placement, costs);
  const std::vector<double> given = given_limits(least, options);
  Best best{costs, given, bound.makespan * options.target * (1 + 1e-9)};
  // What places many actions is done less often.
  const double placed = 3.0 * stages * micro_batches;
  const int affordable = static_cast<int>(std::max(1.0, kMostPlaced / placed));
  const int most_tries = std::min(options.tries, affordable);
  int tries = 0;
  for (PipelineSchedule& known : known_schedules(placement, micro_batches, options.split_backward))
    best.show(join_backward(known, problem.whole));
  const auto limits = tried_limits(least, given);
  for (const DispatchRule& rule : rules()) {
    for (const auto& limit : limits) {
      if (best.enough() || tries++ >= most_tries) break;
      best.show(as_schedule(problem, detail::dispatch(problem, limit, rule)));
    }
  }
  improve(best, problem, given, std::min(options.improvements, affordable));
  best.schedule.name = concat("list schedule of ", stages, " stages");
  return merge_backward(best.schedule, costs);
}

}  // namespace tessera
