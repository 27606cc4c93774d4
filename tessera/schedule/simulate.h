#pragma once
// When each action of a schedule runs, how long the step takes, and what each rank holds.
//
//   const auto s = schedule_1f1b(4, 8);
//   const auto t = simulate(s, PipelineCosts::uniform(4, 1, 1, 1));
//   t.makespan == 33;                        // 24 of work, and 3 times F + B of waiting
//   t.makespan / t.work() - 1 == 0.375;      // the bubble
//   t.peak[0] == 4;                          // activations of stage 0

#include <string>
#include <vector>

#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"

namespace tessera {

struct ActionSpan {
  double start = 0, end = 0;
  bool operator==(const ActionSpan&) const = default;
};

struct Timeline {
  /// spans[rank][i]: of actions[rank][i]. A send, a receive and a release take no time; a gather
  /// and a reduction run beside compute, one after the other on their rank.
  std::vector<std::vector<ActionSpan>> spans;
  /// order[rank][i]: numbers of all actions such that each comes after what it needs.
  std::vector<std::vector<int>> order;
  /// When the last action ends; the step begins at 0.
  double makespan = 0;
  /// Time of each rank's compute.
  std::vector<double> busy;
  /// The most that each rank holds at once, in the unit of StageCosts::activation.
  std::vector<double> peak;

  /// The busiest rank's compute: the makespan without any bubble.
  double work() const;
  /// The share of all ranks' time until the makespan in which they do not compute.
  double bubble() const;
};

/// Each rank does its actions in order, each as soon as it can. What is sent arrives after the
/// edge's time; a schedule without sends and receives has them where the values come to be. Sends
/// and receives keep no rank waiting; who uses a value does. Throws InvalidArgument for costs of
/// another shape, and ScheduleError, with the validator's faults, for a schedule that is not valid.
Timeline simulate(const PipelineSchedule& schedule, const PipelineCosts& costs);

/// A line for each rank, one letter a `unit` of time: F, I, W, B where it computes (small letters
/// for every second micro-batch), '.' where it waits; at most `columns` wide, cut with "...".
/// Throws InvalidArgument for a unit that is not above 0, and spans of another schedule.
std::string timeline_text(const PipelineSchedule& schedule, const Timeline& timeline,
                          double unit = 1, int columns = 400);

// A schedule drawn on a time axis:
//
//   const PipelineSchedule s = schedule_1f1b(4, 8);
//   std::ofstream("1f1b.svg") << visualize_schedule(s, simulate(s, PipelineCosts::uniform(4)));

/// A row for each rank, a box for each compute action (a colour for each kind, a lighter one for
/// the stages after the rank's first, the micro-batch's number where there is room), gathers and
/// reductions as a line below, what each rank holds at most, and the share of time in which ranks
/// wait. Self-contained SVG, to scale. Throws InvalidArgument for the timeline of another schedule,
/// and for more than 200,000 actions.
std::string visualize_schedule(const PipelineSchedule& schedule, const Timeline& timeline);

}  // namespace tessera
