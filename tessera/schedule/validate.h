#pragma once
// What is wrong with a schedule, found before anything is sent.
//
//   auto s = schedule_gpipe(2, 2);
//   s.actions[1].pop_back();
//   validate(s)[0].text();
//   // "rank 1: missing: stage 1 never runs micro-batch 1 backward (B, or I and W)"
//   check(s);   // throws ScheduleError, which lists all faults

#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"

namespace tessera {

enum class ScheduleFaultKind : unsigned char {
  /// Ranks, stages or micro-batches that make no schedule.
  shape,
  /// A stage or micro-batch that there is not, or a kind with a micro-batch that has none.
  unknown,
  /// An action of a stage that is on another rank.
  wrong_rank,
  /// A second time, or W beside B.
  duplicate,
  /// An action that never comes, or one without what belongs to it.
  missing,
  /// An action stands before what it needs, on one rank.
  order,
  /// A send or receive without its other end, or between stages of one rank.
  message,
  /// Parameters that are not gathered, gathered twice, or released when they are not; gradients
  /// reduced too early.
  parameters,
  /// Ranks that wait for each other.
  deadlock,
  /// A rank that holds more than its limit.
  memory,
};

/// "duplicate", "deadlock", ...
std::string to_string(ScheduleFaultKind kind);

struct ScheduleFault {
  ScheduleFaultKind kind;
  /// -1 where it is nobody's in particular.
  int rank = -1;
  /// It counts in the rank's list; -1 where the action is missing.
  int position = -1;
  std::optional<PipelineAction> action = std::nullopt;
  std::string why;
  /// "rank 1, action 3 (1F0): duplicate: ..."
  std::string text() const;
};

/// A schedule that is not valid; what() names the first faults, faults() has all.
class ScheduleError : public Error {
 public:
  ScheduleError(const std::string& name, std::vector<ScheduleFault> faults);
  const std::vector<ScheduleFault>& faults() const { return faults_; }

 private:
  std::vector<ScheduleFault> faults_;
};

/// How sends behave in the search for deadlocks.
enum class SendMode : unsigned char {
  /// A send ends when the other rank receives: what every backend can do. A schedule that runs so
  /// runs with buffers too.
  rendezvous,
  /// A send never waits.
  buffered,
};

struct ValidateOptions {
  /// False for evaluation: forwards alone, and no backward action of any kind.
  bool backward = true;
  SendMode sends = SendMode::rendezvous;
  /// The most that each rank may hold at once, in the unit of StageCosts::activation. Empty: no
  /// limit; one value: of every rank.
  std::vector<double> memory_limit = {};
  /// What a stage holds; unset: 1 a micro-batch.
  std::optional<PipelineCosts> costs = std::nullopt;
};

/// All faults (the first 1000, should there be more); none for a valid schedule. What is checked:
/// - each stage runs each micro-batch forward once and backward once, as B or as I and W, on its
///   own rank;
/// - what comes from a stage on the same rank has come before;
/// - if there are sends or receives, each value that crosses ranks has its pair of them, and none
///   else;
/// - if a stage's parameters are gathered, they are whenever it computes; what is gathered is
///   released; a
///   reduction of gradients comes once, after the stage's last backward;
/// - the step ends: what the ranks do is tried out, and a cycle of ranks that wait for each other
///   is named;
/// - memory limits, where there are some.
/// Throws InvalidArgument where the options do not fit the schedule.
std::vector<ScheduleFault> validate(const PipelineSchedule& schedule,
                                    const ValidateOptions& options = {});

/// Throws ScheduleError if there is a fault.
void check(const PipelineSchedule& schedule, const ValidateOptions& options = {});

/// The most that each rank holds at once if it does its actions in order (exact: it depends on no
/// time). Unknown stages and micro-batches throw InvalidArgument.
std::vector<double> peak_memory(const PipelineSchedule& schedule, const PipelineCosts& costs);

}  // namespace tessera
