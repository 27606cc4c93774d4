#pragma once
// Where each action of a schedule is in its rank's list.

#include <string>
#include <vector>

#include "tessera/schedule/schedule.h"

namespace tessera::detail {

inline constexpr std::size_t kKinds = 11;

/// Why an action's stage or micro-batch is none of the schedule's; empty if they are.
std::string unknown_id(const PipelineSchedule& schedule, const PipelineAction& action);
/// Whether it has backward actions: one for evaluation has forwards alone.
bool trains(const PipelineSchedule& schedule);
/// Whether the ids are the schedule's and the stage is on the rank.
bool known(const PipelineSchedule& schedule, const PipelineAction& action, int rank);
/// The receive of a send, and the send of a receive; its stage may be none of the schedule's.
PipelineAction other_end(const PipelineAction& message);
/// Why a message of the action's kind cannot be; empty if it can. The ids are known.
std::string no_edge(const PipelineSchedule& schedule, const PipelineAction& action);

/// The first of each action on the rank of its stage, gathers and releases left out; -1: there is
/// none. Actions that are not known() or that have no edge are left out.
class Positions {
 public:
  explicit Positions(const PipelineSchedule& schedule);
  int of(ActionKind kind, int stage, int micro_batch) const {
    return at_[static_cast<std::size_t>(kind)][index(stage, micro_batch)];
  }
  int of(const PipelineAction& a) const {
    if (a.kind == ActionKind::reduce_gradient) return reduced_[a.stage];
    return of(a.kind, a.stage, a.micro_batch);
  }
  bool has(ActionKind kind, int stage, int micro_batch) const {
    return of(kind, stage, micro_batch) >= 0;
  }
  /// Of I or B, the first of the two.
  int input_gradient(int stage, int micro_batch) const;

 private:
  std::size_t index(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * micro_batches_ + micro_batch;
  }
  std::size_t micro_batches_;
  // Of the kinds with a micro-batch.
  std::vector<int> at_[8];
  std::vector<int> reduced_;
};

// How large a schedule may be: what is above is refused before memory is taken for it.

inline constexpr int kMostStages = 1 << 20;
/// Stages times micro-batches.
inline constexpr int kMostCells = 1 << 22;
/// Stages that a bound is computed for: its time grows with their square.
inline constexpr int kMostBoundStages = 1 << 12;
/// What a list of faults is cut after.
inline constexpr int kMostFaults = 1000;

}  // namespace tessera::detail
