#pragma once
// From a schedule of compute to one that a rank can run line by line. Each pass takes a valid
// schedule and gives a new one, which is valid too.
//
//   PipelineSchedule s = schedule_zero_bubble_h1(4, 8);
//   s = join_backward(s, {true, false, false, false});   // stage 0 recomputes: B, not I and W
//   s = lower(s);                                        // messages
//
// All throw ScheduleError for a schedule that is not valid, and InvalidArgument for what fits no
// schedule of that shape.

#include <optional>
#include <vector>

#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"

namespace tessera {

/// Adds the sends and receives. Both ends of a message are put where the sender has just computed
/// the value, as the simulation with `costs` has it: then all ranks meet their messages in the
/// order of one clock, so that not even sends that wait for their receiver can deadlock, and no
/// receive stands before work that it would hold up. Throws InvalidArgument where there are
/// messages already.
PipelineSchedule insert_messages(const PipelineSchedule& schedule, const PipelineCosts& costs);
/// Each action takes a time of 1.
PipelineSchedule insert_messages(const PipelineSchedule& schedule);

/// Adds gathers and releases of the stages that are `sharded` (one value for each). A rank has the
/// parameters of at most `at_once` of them gathered (0: of all its stages), and gathers as seldom
/// as that allows: where there is room, once a step. What must make room is what is used again last
/// (Belady 1966). A gather comes one compute action before the one that needs it, where there is
/// room by then, so that it can go on beside that. Throws InvalidArgument where there are gathers
/// or releases already.
PipelineSchedule insert_gathers(const PipelineSchedule& schedule, const std::vector<bool>& sharded,
                                int at_once = 0);

/// Adds a reduction of the gradients of each `reduced` stage, once, after its last backward.
/// Throws InvalidArgument where there are reductions already.
PipelineSchedule insert_reductions(const PipelineSchedule& schedule,
                                   const std::vector<bool>& reduced);

struct LowerOptions {
  /// Stages whose parameters are fully sharded; empty: none.
  std::vector<bool> sharded = {};
  int gathered_at_once = 0;
  /// Stages whose gradients are reduced over other ranks; empty: none.
  std::vector<bool> reduced = {};
  /// What the order of messages is made for; unset: 1 for each action.
  std::optional<PipelineCosts> costs = std::nullopt;
};

/// All three.
PipelineSchedule lower(const PipelineSchedule& schedule, const LowerOptions& options = {});

/// I and W of the stages that are `whole` become B, at the place of I: for stages that recompute,
/// whose two halves would run the forward twice. Throws InvalidArgument where there are messages,
/// gathers or reductions.
PipelineSchedule join_backward(const PipelineSchedule& schedule, const std::vector<bool>& whole);

/// An I and its W that are one after the other become B where the gradient is not used before both
/// have ended anyway, and B takes no longer: one pass through the graph instead of two, and no
/// later end. Throws as join_backward().
PipelineSchedule merge_backward(const PipelineSchedule& schedule, const PipelineCosts& costs);

/// Its forwards alone, for evaluation. Throws as join_backward().
PipelineSchedule forward_only(const PipelineSchedule& schedule);

}  // namespace tessera
