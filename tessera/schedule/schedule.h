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

}  // namespace tessera
