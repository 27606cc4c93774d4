#include "tessera/schedule/detail/deadlock.h"

#include <algorithm>
#include <optional>

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// An action of another rank.
struct Wait {
  int rank;
  int position;
};

class Trial {
 public:
  Trial(const PipelineSchedule& schedule, const Positions& at, bool lowered, SendMode sends)
      : schedule_(schedule),
        at_(at),
        lowered_(lowered),
        sends_(sends),
        next_(schedule.ranks(), 0) {}

  std::vector<ScheduleFault> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        while (!done(rank) && !waits(rank)) {
          ++next_[rank];
          moved = true;
        }
      }
    }
    std::vector<ScheduleFault> faults;
    // 0: not looked at; else the number of the walk that came by.
    std::vector<int> seen(schedule_.ranks(), 0);
    for (int first = 0; first < schedule_.ranks(); ++first) {
      int rank = first;
      while (!done(rank) && seen[rank] == 0) {
        seen[rank] = first + 1;
        rank = waits(rank)->rank;
      }
      if (!done(rank) && seen[rank] == first + 1) faults.push_back(cycle(rank));
    }
    return faults;
  }

 private:
  bool done(int rank) const {
    return next_[rank] == static_cast<int>(schedule_.actions[rank].size());
  }

  // What the rank's next action waits for.
  std::optional<Wait> waits(int rank) const {
    const PipelineAction& a = schedule_.actions[rank][next_[rank]];
    if (!known(schedule_, a, rank)) return std::nullopt;
    if (is_compute(a.kind))
      return a.kind == ActionKind::weight_gradient ? std::nullopt : value(rank, a);
    if (is_message(a.kind) && sends_ == SendMode::rendezvous && no_edge(schedule_, a).empty()) {
      return other_end(a);
    }
    return std::nullopt;
  }

  // A value that comes from another rank.
  std::optional<Wait> value(int rank, const PipelineAction& a) const {
    const bool forward = a.kind == ActionKind::forward;
    const int other = forward ? a.stage - 1 : a.stage + 1;
    if (other < 0 || other >= schedule_.stages() || schedule_.placement[other] == rank)
      return std::nullopt;
    int from = -1;
    if (!lowered_) {
      from = forward ? at_.of(ActionKind::forward, other, a.micro_batch)
                     : at_.input_gradient(other, a.micro_batch);
    } else if (sends_ == SendMode::buffered) {
      from = at_.of(forward ? ActionKind::send_activation : ActionKind::send_gradient, other,
                    a.micro_batch);
    }
    return until({schedule_.placement[other], from}, false);
  }

  // Both ends of a message go on when both are there.
  std::optional<Wait> other_end(const PipelineAction& a) const {
    PipelineAction other = a;
    switch (a.kind) {
      case ActionKind::send_activation:
        other = {ActionKind::receive_activation, a.stage + 1, a.micro_batch};
        break;
      case ActionKind::receive_activation:
        other = {ActionKind::send_activation, a.stage - 1, a.micro_batch};
        break;
      case ActionKind::send_gradient:
        other = {ActionKind::receive_gradient, a.stage - 1, a.micro_batch};
        break;
      default:
        other = {ActionKind::send_gradient, a.stage + 1, a.micro_batch};
    }
    return until({schedule_.placement[other.stage], at_.of(other)}, true);
  }

  // Nothing if the action is missing, done, or, where that is enough, next.
  std::optional<Wait> until(Wait wait, bool next_is_enough) const {
    const int reached = next_[wait.rank] + (next_is_enough ? 1 : 0);
    if (wait.position < 0 || wait.position < reached) return std::nullopt;
    return wait;
  }

  ScheduleFault cycle(int rank) const {
    // It begins with its lowest rank, so that the same cycle is always told alike.
    int lowest = rank;
    for (int r = waits(rank)->rank; r != rank; r = waits(r)->rank) lowest = std::min(lowest, r);
    ScheduleFault fault{ScheduleFaultKind::deadlock, lowest, next_[lowest],
                        schedule_.actions[lowest][next_[lowest]], ""};
    int r = lowest, told = 0;
    do {
      const Wait wait = *waits(r);
      if (told++ < 16) {
        fault.why += concat(told == 1 ? "" : "; ", "rank ", r, " waits in action ", next_[r], " (",
                            schedule_.actions[r][next_[r]], ") for action ", wait.position, " (",
                            schedule_.actions[wait.rank][wait.position], ") of rank ", wait.rank);
      }
      r = wait.rank;
    } while (r != lowest);
    fault.why += told > 16 ? concat("; ... (", told, " ranks in all)") : "";
    fault.why += "; none of them goes on";
    return fault;
  }

  const PipelineSchedule& schedule_;
  const Positions& at_;
  bool lowered_;
  SendMode sends_;
  // The action that each rank does next.
  std::vector<int> next_;
};

}  // namespace

std::vector<ScheduleFault> find_deadlocks(const PipelineSchedule& schedule, const Positions& at,
                                          bool lowered, SendMode sends) {
  return Trial(schedule, at, lowered, sends).run();
}

}  // namespace tessera::detail
