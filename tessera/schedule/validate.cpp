#include "tessera/schedule/validate.h"

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/schedule/detail/positions.h"

namespace tessera {
namespace {

using detail::Positions;

// ---- ranks that wait for each other, found by trying the schedule out ----

// An action of another rank.
struct Wait {
  int rank;
  int position;
};

// What is missing is taken to be there, so that a cycle is one of what the lists hold. `lowered`:
// values cross ranks by sends and receives only.
class Trial {
 public:
  Trial(const PipelineSchedule& schedule, const Positions& at, bool lowered, SendMode sends)
      : schedule_(schedule),
        at_(at),
        lowered_(lowered),
        sends_(sends),
        next_(schedule.ranks(), 0) {}

  // A fault for each cycle of waiting ranks, at the one of the lowest rank.
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
    if (!detail::known(schedule_, a, rank)) return std::nullopt;
    if (is_compute(a.kind))
      return a.kind == ActionKind::weight_gradient ? std::nullopt : value(rank, a);
    if (!is_message(a.kind) || sends_ == SendMode::buffered ||
        !detail::no_edge(schedule_, a).empty())
      return std::nullopt;
    // Both ends of a message go on when both are there.
    const PipelineAction other = detail::other_end(a);
    return until({schedule_.placement[other.stage], at_.of(other)}, true);
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

// ---- all faults ----

class Validator {
 public:
  Validator(const PipelineSchedule& schedule, const ValidateOptions& options)
      : schedule_(schedule), options_(options) {}

  std::vector<ScheduleFault> run() {
    if (!shape()) return std::move(faults_);
    at_.emplace(schedule_);
    for (int rank = 0; rank < schedule_.ranks(); ++rank)
      for (int i = 0; i < count(rank); ++i) action(rank, i);
    for (int s = 0; s < schedule_.stages(); ++s) {
      for (int k = 0; k < schedule_.micro_batches && faults_.size() <= detail::kMostFaults; ++k) {
        missing(s, k);
        order(s, k);
        if (lowered_) pairs(s, k);
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) parameters(rank);
    reductions();
    for (ScheduleFault& fault : Trial(schedule_, *at_, lowered_, options_.sends).run())
      faults_.push_back(std::move(fault));
    if (!options_.memory_limit.empty()) memory();
    if (faults_.size() > detail::kMostFaults) faults_.resize(detail::kMostFaults);
    return std::move(faults_);
  }

 private:
  int count(int rank) const { return static_cast<int>(schedule_.actions[rank].size()); }
  const PipelineAction& get(int rank, int i) const { return schedule_.actions[rank][i]; }

  void fault(ScheduleFaultKind kind, int rank, int position, const std::string& why) {
    if (faults_.size() > detail::kMostFaults) return;
    ScheduleFault fault{kind, rank, position, std::nullopt, why};
    if (position >= 0) fault.action = get(rank, position);
    faults_.push_back(std::move(fault));
  }

  bool shape() {
    try {
      const int ranks = ranks_of(schedule_.placement);
      if (ranks != schedule_.ranks()) {
        fault(ScheduleFaultKind::shape, -1, -1,
              concat("the placement has ", ranks, " ranks, and there are actions of ",
                     schedule_.ranks()));
      }
      const int most = detail::kMostCells / schedule_.stages();
      if (schedule_.micro_batches < 1 || schedule_.micro_batches > most) {
        fault(ScheduleFaultKind::shape, -1, -1,
              concat(schedule_.micro_batches, " micro-batches of ", schedule_.stages(),
                     " stages; there must be 1 to ", most));
      }
    } catch (const InvalidArgument& error) {
      fault(ScheduleFaultKind::shape, -1, -1, error.what());
    }
    return faults_.empty();
  }

  // What can be said of an action alone, and whether it was there before.
  void action(int rank, int i) {
    const PipelineAction& a = get(rank, i);
    if (static_cast<std::size_t>(a.kind) >= detail::kKinds)
      return fault(ScheduleFaultKind::unknown, rank, -1, concat("action ", i, " is of no kind"));
    const std::string why = detail::unknown_id(schedule_, a);
    if (!why.empty()) return fault(ScheduleFaultKind::unknown, rank, i, why);
    if (schedule_.placement[a.stage] != rank) {
      return fault(ScheduleFaultKind::wrong_rank, rank, i,
                   concat("stage ", a.stage, " is on rank ", schedule_.placement[a.stage]));
    }
    if (!options_.backward && a.kind != ActionKind::forward &&
        a.kind != ActionKind::send_activation && a.kind != ActionKind::receive_activation &&
        a.kind != ActionKind::gather && a.kind != ActionKind::release) {
      return fault(ScheduleFaultKind::unknown, rank, i,
                   "a schedule for evaluation has forwards alone");
    }
    if (is_message(a.kind)) {
      lowered_ = true;
      const std::string no_edge = detail::no_edge(schedule_, a);
      if (!no_edge.empty()) return fault(ScheduleFaultKind::message, rank, i, no_edge);
    }
    if (a.kind == ActionKind::gather || a.kind == ActionKind::release) return;
    const int before = at_->of(a);
    if (before >= 0 && before < i)
      fault(ScheduleFaultKind::duplicate, rank, i, concat("it was action ", before, " already"));
    if (a.kind == ActionKind::input_gradient || a.kind == ActionKind::weight_gradient) {
      const int whole = at_->of(ActionKind::backward, a.stage, a.micro_batch);
      if (whole >= 0) {
        fault(ScheduleFaultKind::duplicate, rank, i,
              concat("action ", whole, ", ", get(rank, whole), ", computes it as well"));
      }
    }
  }

  void missing(int s, int k) {
    const int rank = schedule_.placement[s];
    const bool forward = at_->has(ActionKind::forward, s, k);
    const bool whole = at_->has(ActionKind::backward, s, k);
    const bool input = at_->has(ActionKind::input_gradient, s, k);
    const bool weight = at_->has(ActionKind::weight_gradient, s, k);
    const std::string of = concat("stage ", s, " never runs micro-batch ", k, " ");
    if (!forward) fault(ScheduleFaultKind::missing, rank, -1, of + "forward (F)");
    if (!options_.backward || whole) return;
    if (!input && !weight)
      fault(ScheduleFaultKind::missing, rank, -1, of + "backward (B, or I and W)");
    if (input && !weight) {
      fault(ScheduleFaultKind::missing, rank, at_->of(ActionKind::input_gradient, s, k),
            concat("its weight gradient, ", s, "W", k, ", never comes"));
    }
    if (weight && !input) {
      fault(ScheduleFaultKind::missing, rank, at_->of(ActionKind::weight_gradient, s, k),
            concat("its input gradient, ", s, "I", k, ", never comes"));
    }
  }

  // `first` must come before `then`, both on this rank.
  void ordered(int rank, int first, int then) {
    if (first >= 0 && then >= 0 && first > then) {
      fault(ScheduleFaultKind::order, rank, then,
            concat("it needs ", get(rank, first), ", which is action ", first));
    }
  }

  void order(int s, int k) {
    const int rank = schedule_.placement[s];
    const int forward = at_->of(ActionKind::forward, s, k);
    const int gradient = at_->input_gradient(s, k);
    if (s > 0 && schedule_.placement[s - 1] == rank) {
      ordered(rank, at_->of(ActionKind::forward, s - 1, k), forward);
      ordered(rank, gradient, at_->input_gradient(s - 1, k));
    }
    ordered(rank, forward, gradient);
    const int weight = at_->of(ActionKind::weight_gradient, s, k);
    ordered(rank, at_->of(ActionKind::input_gradient, s, k), weight);
    if (gradient < 0) ordered(rank, forward, weight);
  }

  // The messages of stage s with the one behind it.
  void pairs(int s, int k) {
    if (s + 1 >= schedule_.stages() || schedule_.placement[s] == schedule_.placement[s + 1]) return;
    const int forward = at_->of(ActionKind::forward, s, k);
    const int used = at_->of(ActionKind::forward, s + 1, k);
    pair({ActionKind::send_activation, s, k}, forward, used);
    if (!options_.backward) return;
    pair({ActionKind::send_gradient, s + 1, k}, at_->input_gradient(s + 1, k),
         at_->input_gradient(s, k));
  }

  void pair(const PipelineAction& send, int made, int used) {
    const PipelineAction receive = detail::other_end(send);
    const int from = schedule_.placement[send.stage], to = schedule_.placement[receive.stage];
    const int sent = at_->of(send), received = at_->of(receive);
    if (sent < 0) {
      fault(ScheduleFaultKind::message, from, -1,
            concat(send, " is missing",
                   received < 0 ? "" : concat(": rank ", to, " receives it in action ", received)));
    }
    if (received < 0) {
      fault(ScheduleFaultKind::message, to, -1,
            concat(receive, " is missing",
                   sent < 0 ? "" : concat(": rank ", from, " sends it in action ", sent)));
    }
    ordered(from, made, sent);
    ordered(to, received, used);
  }

  void parameters(int rank) {
    // Of each stage of the rank: whether its parameters come and go, and are there now.
    std::vector<bool> sharded(schedule_.stages()), here(schedule_.stages());
    for (int i = 0; i < count(rank); ++i) {
      const PipelineAction& a = get(rank, i);
      if (detail::known(schedule_, a, rank) &&
          (a.kind == ActionKind::gather || a.kind == ActionKind::release)) {
        sharded[a.stage] = true;
      }
    }
    for (int i = 0; i < count(rank); ++i) {
      const PipelineAction& a = get(rank, i);
      if (!detail::known(schedule_, a, rank) || !sharded[a.stage]) continue;
      if (a.kind == ActionKind::gather && here[a.stage]) {
        fault(ScheduleFaultKind::parameters, rank, i,
              "the stage's parameters are gathered already");
      }
      if ((a.kind == ActionKind::release || is_compute(a.kind)) && !here[a.stage])
        fault(ScheduleFaultKind::parameters, rank, i, "the stage's parameters are not gathered");
      if (a.kind == ActionKind::gather) here[a.stage] = true;
      if (a.kind == ActionKind::release) here[a.stage] = false;
    }
    for (int s = 0; s < schedule_.stages(); ++s) {
      if (here[s]) {
        fault(ScheduleFaultKind::parameters, rank, -1,
              concat("the parameters of stage ", s, " are never released"));
      }
    }
  }

  void reductions() {
    for (int s = 0; s < schedule_.stages(); ++s) {
      const int rank = schedule_.placement[s];
      const int reduced = at_->of({ActionKind::reduce_gradient, s, -1});
      if (reduced < 0) continue;
      int last = -1;
      for (int k = 0; k < schedule_.micro_batches; ++k)
        for (const ActionKind kind : {ActionKind::backward, ActionKind::weight_gradient})
          last = std::max(last, at_->of(kind, s, k));
      if (last > reduced) {
        fault(ScheduleFaultKind::parameters, rank, reduced,
              concat(get(rank, last), ", action ", last, ", still adds to the gradients"));
      }
    }
  }

  void memory() {
    const PipelineCosts costs =
        options_.costs ? *options_.costs : PipelineCosts::uniform(schedule_.stages());
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const double limit = options_.memory_limit.size() == 1 ? options_.memory_limit[0]
                                                             : options_.memory_limit[rank];
      double held = 0;
      for (int i = 0; i < count(rank); ++i) {
        const PipelineAction& a = get(rank, i);
        if (!detail::known(schedule_, a, rank)) continue;
        held += costs.held_at_start(a);
        if (held > limit * (1 + 1e-9)) {
          fault(ScheduleFaultKind::memory, rank, i,
                concat("the rank then holds ", held, ", above its limit of ", limit));
          break;
        }
        held += costs.held_at_end(a);
      }
    }
  }

  const PipelineSchedule& schedule_;
  const ValidateOptions& options_;
  std::optional<Positions> at_;
  bool lowered_ = false;
  std::vector<ScheduleFault> faults_;
};

}  // namespace

std::string to_string(ScheduleFaultKind kind) {
  constexpr std::array<const char*, 10> kNames = {"shape",    "unknown", "wrong rank", "duplicate",
                                                  "missing",  "order",   "message",    "parameters",
                                                  "deadlock", "memory"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::string ScheduleFault::text() const {
  std::string where;
  if (rank >= 0) where = concat("rank ", rank);
  if (position >= 0) where += concat(", action ", position);
  if (action) where += concat(" (", *action, ")");
  return concat(where, where.empty() ? "" : ": ", to_string(kind), ": ", why);
}

namespace {

std::string told(const std::string& name, const std::vector<ScheduleFault>& faults) {
  constexpr std::size_t kShown = 12;
  std::string text = concat(name.empty() ? "the schedule" : printable(name), " is not valid; ",
                            faults.size(), faults.size() == 1 ? " fault:" : " faults:");
  for (std::size_t i = 0; i < std::min(faults.size(), kShown); ++i)
    text += "\n  " + faults[i].text();
  if (faults.size() > kShown) text += concat("\n  and ", faults.size() - kShown, " more");
  return text;
}

}  // namespace

ScheduleError::ScheduleError(const std::string& name, std::vector<ScheduleFault> faults)
    : Error(told(name, faults)), faults_(std::move(faults)) {}

std::vector<ScheduleFault> validate(const PipelineSchedule& schedule,
                                    const ValidateOptions& options) {
  const std::size_t limits = options.memory_limit.size();
  if (limits > 1 && limits != schedule.actions.size()) {
    throw InvalidArgument(limits, " memory limits; give one, or one for each of the ",
                          schedule.actions.size(), " ranks");
  }
  for (const double limit : options.memory_limit)
    if (!(limit >= 0))
      throw InvalidArgument("a memory limit of ", limit, "; it must be 0 or above");
  if (options.costs) options.costs->check(schedule.stages(), schedule.micro_batches);
  return Validator(schedule, options).run();
}

void check(const PipelineSchedule& schedule, const ValidateOptions& options) {
  auto faults = validate(schedule, options);
  if (!faults.empty()) throw ScheduleError(schedule.name, std::move(faults));
}

std::vector<double> peak_memory(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  costs.check(schedule.stages(), schedule.micro_batches);
  std::vector<double> peaks;
  for (const auto& row : schedule.actions) {
    double held = 0, peak = 0;
    for (const PipelineAction& a : row) {
      const std::string why = detail::unknown_id(schedule, a);
      if (!why.empty()) throw InvalidArgument(a, ": ", why);
      held += costs.held_at_start(a);
      peak = std::max(peak, held);
      held += costs.held_at_end(a);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace tessera
