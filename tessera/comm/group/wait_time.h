#pragma once
// WaitTime: how long a thread has waited for other ranks in calls of groups.
//
//   const WaitTime waiting;
//   ...a training step: gradients are reduced, a loss is added up...
//   waiting.total();  // what remains of the step's time is this rank's own work

#include <chrono>

#include "tessera/base/pinned.h"

namespace tessera {

/// Adds up, while it lives, the time that the calling thread spends in calls of groups, whatever
/// they are made by: all of a blocking call, and the wait() of a started one, since until then the
/// rank goes on with its work. Of two that live on one thread the inner one counts, and hands what
/// it has counted to the outer one at its end. Calls of a device's stream, for which the host does
/// not wait, and calls of other threads are not counted. When none lives, a call pays one test of a
/// pointer.
class WaitTime : Pinned {
 public:
  using Clock = std::chrono::steady_clock;

  WaitTime();
  ~WaitTime();

  Clock::duration total() const { return total_; }

  /// True if one lives on this thread.
  static bool counts();
  /// Adds to the one of this thread, which must be there.
  static void add(Clock::duration waited);

 private:
  WaitTime* const outer_;
  Clock::duration total_{0};
};

}  // namespace tessera
