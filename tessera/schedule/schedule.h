#pragma once
// A pipeline schedule as a value: for each rank, the actions that it does, in order. Everything
// else (generators, passes, the validator, the simulator, pictures) makes, changes or reads this
// one.
//
//   PipelineSchedule s = lower(schedule_1f1b(2, 3));   // 2 stages on 2 ranks, 3 micro-batches
//   check(s);                                          // throws, with every fault named
//   for (const PipelineAction& action : s.actions[rank]) {
//     if (is_message(action.kind)) {
//       const PipelineMessage m = message_of(s, action);   // with whom, and under which tag
//       ...
//     }
//   }

#include <string>
#include <string_view>
#include <vector>

#include "tessera/schedule/action.h"

namespace tessera {

/// Stages are numbered in the order in which a micro-batch passes them; several may be on one rank.
struct PipelineSchedule {
  /// Titles and messages show it to people.
  std::string name;
  /// placement[stage] is the rank that holds the stage.
  std::vector<int> placement;
  int micro_batches = 0;
  /// actions[rank], in the order in which the rank does them.
  std::vector<std::vector<PipelineAction>> actions;
  bool operator==(const PipelineSchedule&) const = default;

  int ranks() const { return static_cast<int>(actions.size()); }
  int stages() const { return static_cast<int>(placement.size()); }
  /// Ascending.
  std::vector<int> stages_of(int rank) const;
};

/// Stage s on rank s mod `ranks`: each rank holds `chunks` stages, and a micro-batch goes round.
/// One chunk is the plain pipeline. Throws InvalidArgument for ranks or chunks below 1, or too
/// many.
std::vector<int> loop_placement(int ranks, int chunks = 1);
/// There and back: 0, 1, ..., p - 1, p - 1, ..., 1, 0 for two chunks, and so on in turn. The first
/// and the last stage are both on rank 0 where `chunks` is even. Throws as loop_placement().
std::vector<int> v_placement(int ranks, int chunks = 2);
/// The number of ranks of a placement: the largest rank plus 1. Throws InvalidArgument where there
/// is no stage, a negative rank, or a rank below the largest that holds none.
int ranks_of(const std::vector<int>& placement);

/// A send or receive has a peer, and a tag that both ends give it. Tags are unique within a
/// step.
struct PipelineMessage {
  /// The rank of the other end.
  int peer;
  int tag;
  bool operator==(const PipelineMessage&) const = default;
};

/// The other end of a send or receive. Throws InvalidArgument for other actions, for unknown stages
/// and micro-batches, and where there is no stage to send to (an activation of the last stage, a
/// gradient of the first).
PipelineMessage message_of(const PipelineSchedule& schedule, const PipelineAction& action);

/// A row for each rank: "rank 0: 0F0 0F1 0B0 ...", after a line with the name, stages and
/// micro-batches.
std::string to_string(const PipelineSchedule& schedule);

// Schedules as CSV: a header of three lines, then a line of actions for each rank.
//
//   schedule,1,1F1B            the format's version, and the name
//   micro_batches,2
//   placement,0,1              the rank of each stage
//   0F0,0F1,0B0,0B1
//   1F0,1B0,1F1,1B1
//
// The reader is strict: it takes what the writer makes (line ends may be CR LF) and names line,
// column and what was expected for all else. It reads; whether the schedule is right is what
// validate() says.

/// Limits of what is read, for text that comes from others.
struct CsvLimits {
  std::size_t bytes = std::size_t{64} << 20;
  std::size_t actions = std::size_t{1} << 24;
};

/// Throws InvalidArgument where the name has a comma, a quote or a control character.
std::string to_csv(const PipelineSchedule& schedule);
/// Throws ScheduleSyntaxError, and InvalidArgument for a placement that ranks_of() refuses.
PipelineSchedule schedule_from_csv(std::string_view text, const CsvLimits& limits = {});
/// A table without the header, as other programs write it: a line of actions for each rank, where
/// empty cells are bubbles. Throws as schedule_from_csv().
PipelineSchedule schedule_from_table(std::string_view text, std::vector<int> placement,
                                     int micro_batches, const CsvLimits& limits = {});

}  // namespace tessera
