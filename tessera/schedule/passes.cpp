#include "tessera/schedule/passes.h"

#include <algorithm>
#include <limits>

#include "tessera/schedule/detail/positions.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

namespace tessera {
namespace {

template <class Predicate>
void refuse_where(const PipelineSchedule& schedule, const char* what, const Predicate& is) {
  for (const auto& row : schedule.actions) {
    for (const PipelineAction& a : row) {
      if (is(a.kind)) {
        throw InvalidArgument(schedule.name.empty() ? "the schedule" : schedule.name, " has ", what,
                              " already: ", a);
      }
    }
  }
}

void refuse_lowered(const PipelineSchedule& schedule) {
  refuse_where(schedule, "messages, gathers or reductions",
               [](ActionKind kind) { return !is_compute(kind); });
}

void check_flags(const PipelineSchedule& schedule, const std::vector<bool>& flags,
                 const char* what) {
  if (flags.size() == static_cast<std::size_t>(schedule.stages())) return;
  throw InvalidArgument(flags.size(), " values that say which stages are ", what,
                        "; the schedule has ", schedule.stages(), " stages");
}

// Also schedules of forwards alone.
void check_either(const PipelineSchedule& schedule) {
  check(schedule, {.backward = detail::trains(schedule)});
}

PipelineSchedule without_actions(const PipelineSchedule& schedule) {
  return {schedule.name, schedule.placement, schedule.micro_batches,
          std::vector<std::vector<PipelineAction>>(schedule.actions.size())};
}

// The start of an action, or the end of a compute action.
struct Event {
  double time;
  // Number of the action in an order in which each comes after what it needs.
  int order;
  bool end;
  int rank, position;
};

// The events in the order of their times; what happens at once in the order of what needs what.
std::vector<Event> events_of(const PipelineSchedule& schedule, const Timeline& timeline) {
  std::vector<Event> events;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    // What goes on beside compute is begun where it is in the list, though it may have to wait.
    double now = 0;
    for (int i = 0; i < static_cast<int>(schedule.actions[rank].size()); ++i) {
      const int order = timeline.order[rank][i];
      const bool compute = is_compute(schedule.actions[rank][i].kind);
      events.push_back({compute ? timeline.spans[rank][i].start : now, order, false, rank, i});
      if (!compute) continue;
      now = timeline.spans[rank][i].end;
      events.push_back({now, order, true, rank, i});
    }
  }
  std::ranges::sort(events, [](const Event& a, const Event& b) {
    if (a.time != b.time) return a.time < b.time;
    if (a.order != b.order) return a.order < b.order;
    return !a.end && b.end;
  });
  return events;
}

// A rank's stages that are gathered, and when each is used.
class Gathers {
 public:
  Gathers(const std::vector<PipelineAction>& row, const std::vector<bool>& sharded, int at_once)
      : row_(row), sharded_(sharded), here_(sharded.size()) {
    std::size_t used = 0;
    uses_.resize(sharded.size());
    for (std::size_t i = 0; i < row.size(); ++i)
      if (needs(i)) uses_[row[i].stage].push_back(i);
    for (const auto& uses : uses_) used += uses.empty() ? 0 : 1;
    room_ = at_once == 0 ? std::max<std::size_t>(used, 1) : static_cast<std::size_t>(at_once);
  }

  std::vector<PipelineAction> run() {
    for (std::size_t i = 0; i < row_.size(); ++i) {
      if (needs(i)) fetch(row_[i].stage, i);
      if (is_compute(row_[i].kind)) next_compute(i);
      out_.push_back(row_[i]);
      if (!needs(i)) continue;
      const int stage = row_[i].stage;
      if (uses_[stage].back() == i) release(stage);
    }
    return std::move(out_);
  }

 private:
  bool needs(std::size_t i) const { return is_compute(row_[i].kind) && sharded_[row_[i].stage]; }

  void release(int stage) {
    out_.push_back({ActionKind::release, stage, -1});
    here_[stage] = false;
    --gathered_;
  }

  std::size_t next_use(int stage, std::size_t from) const {
    const auto& uses = uses_[stage];
    const auto use = std::ranges::lower_bound(uses, from);
    return use == uses.end() ? std::numeric_limits<std::size_t>::max() : *use;
  }

  void fetch(int stage, std::size_t i) {
    if (here_[stage]) return;
    if (gathered_ == room_) {
      int last = -1;
      for (int s = 0; s < static_cast<int>(here_.size()); ++s)
        if (here_[s] && (last < 0 || next_use(s, i) > next_use(last, i))) last = s;
      release(last);
    }
    out_.push_back({ActionKind::gather, stage, -1});
    here_[stage] = true;
    ++gathered_;
  }

  // Before action i runs: what the compute action after it needs, if there is room.
  void next_compute(std::size_t i) {
    for (std::size_t next = i + 1; next < row_.size(); ++next) {
      if (!is_compute(row_[next].kind)) continue;
      if (needs(next) && gathered_ < room_) fetch(row_[next].stage, next);
      return;
    }
  }

  const std::vector<PipelineAction>& row_;
  const std::vector<bool>& sharded_;
  std::vector<bool> here_;
  std::vector<std::vector<std::size_t>> uses_;
  std::size_t room_ = 0, gathered_ = 0;
  std::vector<PipelineAction> out_;
};

}  // namespace

PipelineSchedule insert_messages(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  refuse_where(schedule, "messages", is_message);
  const Timeline timeline = simulate(schedule, costs);
  PipelineSchedule next = without_actions(schedule);
  const auto send = [&](const PipelineAction& message) {
    const PipelineAction other = detail::other_end(message);
    if (other.stage < 0 || other.stage >= schedule.stages()) return;
    const int from = schedule.placement[message.stage], to = schedule.placement[other.stage];
    if (from == to) return;
    next.actions[from].push_back(message);
    next.actions[to].push_back(other);
  };
  for (const Event& event : events_of(schedule, timeline)) {
    const PipelineAction& a = schedule.actions[event.rank][event.position];
    if (!event.end) {
      next.actions[event.rank].push_back(a);
      continue;
    }
    if (a.kind == ActionKind::forward)
      send({ActionKind::send_activation, a.stage, a.micro_batch});
    else if (makes_input_gradient(a.kind))
      send({ActionKind::send_gradient, a.stage, a.micro_batch});
  }
  return next;
}

PipelineSchedule insert_messages(const PipelineSchedule& schedule) {
  return insert_messages(schedule, PipelineCosts::uniform(schedule.stages()));
}

PipelineSchedule insert_gathers(const PipelineSchedule& schedule, const std::vector<bool>& sharded,
                                int at_once) {
  check_flags(schedule, sharded, "sharded");
  if (at_once < 0) throw InvalidArgument(at_once, " stages gathered at once; 0 means all");
  refuse_where(schedule, "gathers or releases", [](ActionKind kind) {
    return kind == ActionKind::gather || kind == ActionKind::release;
  });
  check_either(schedule);
  PipelineSchedule next = schedule;
  for (auto& row : next.actions) row = Gathers(row, sharded, at_once).run();
  return next;
}

PipelineSchedule insert_reductions(const PipelineSchedule& schedule,
                                   const std::vector<bool>& reduced) {
  check_flags(schedule, reduced, "reduced");
  refuse_where(schedule, "reductions",
               [](ActionKind kind) { return kind == ActionKind::reduce_gradient; });
  check(schedule);
  PipelineSchedule next = without_actions(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<int> left(schedule.stages(), schedule.micro_batches);
    const auto& row = schedule.actions[rank];
    auto& out = next.actions[rank];
    // A release that follows the last backward stays with it: its memory is free before the
    // reduction's is taken.
    int due = -1;
    for (const PipelineAction& a : row) {
      if (due >= 0 && !(a.kind == ActionKind::release && a.stage == due)) {
        out.push_back({ActionKind::reduce_gradient, due, -1});
        due = -1;
      }
      out.push_back(a);
      if (makes_weight_gradient(a.kind) && --left[a.stage] == 0 && reduced[a.stage]) due = a.stage;
    }
    if (due >= 0) out.push_back({ActionKind::reduce_gradient, due, -1});
  }
  return next;
}

PipelineSchedule lower(const PipelineSchedule& schedule, const LowerOptions& options) {
  PipelineSchedule next =
      options.costs ? insert_messages(schedule, *options.costs) : insert_messages(schedule);
  if (!options.sharded.empty())
    next = insert_gathers(next, options.sharded, options.gathered_at_once);
  if (!options.reduced.empty()) next = insert_reductions(next, options.reduced);
  return next;
}

PipelineSchedule join_backward(const PipelineSchedule& schedule, const std::vector<bool>& whole) {
  check_flags(schedule, whole, "whole");
  refuse_lowered(schedule);
  check(schedule);
  PipelineSchedule next = without_actions(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (PipelineAction a : schedule.actions[rank]) {
      if (whole[a.stage] && a.kind == ActionKind::weight_gradient) continue;
      if (whole[a.stage] && a.kind == ActionKind::input_gradient) a.kind = ActionKind::backward;
      next.actions[rank].push_back(a);
    }
  }
  return next;
}

PipelineSchedule merge_backward(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  refuse_lowered(schedule);
  check(schedule);
  const Timeline timeline = simulate(schedule, costs);
  // Rounding counts for nothing.
  const double same = 1e-9 * timeline.makespan;
  // When the gradient of a stage's input is used, by stage and micro-batch.
  const auto cell = [&](int stage, int micro_batch) {
    return static_cast<std::size_t>(stage) * schedule.micro_batches + micro_batch;
  };
  std::vector<double> used(cell(schedule.stages(), 0), std::numeric_limits<double>::infinity());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const PipelineAction& a = schedule.actions[rank][i];
      if (makes_input_gradient(a.kind) && a.stage + 1 < schedule.stages())
        used[cell(a.stage + 1, a.micro_batch)] = timeline.spans[rank][i].start;
    }
  }
  PipelineSchedule next = without_actions(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& row = schedule.actions[rank];
    for (std::size_t i = 0; i < row.size(); ++i) {
      const PipelineAction& a = row[i];
      next.actions[rank].push_back(a);
      if (a.kind != ActionKind::input_gradient || i + 1 == row.size()) continue;
      if (row[i + 1] != PipelineAction{ActionKind::weight_gradient, a.stage, a.micro_batch})
        continue;
      const PipelineAction both{ActionKind::backward, a.stage, a.micro_batch};
      if (costs.time(both) > costs.time(a) + costs.time(row[i + 1]) + same) continue;
      const double travel =
          a.stage > 0 ? costs.travel(a.stage, a.stage - 1, schedule.placement) : 0;
      if (timeline.spans[rank][i].start + costs.time(both) + travel >
          used[cell(a.stage, a.micro_batch)] + same)
        continue;
      next.actions[rank].back() = both;
      ++i;
    }
  }
  return next;
}

PipelineSchedule forward_only(const PipelineSchedule& schedule) {
  refuse_lowered(schedule);
  check_either(schedule);
  PipelineSchedule next = without_actions(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const PipelineAction& a : schedule.actions[rank])
      if (a.kind == ActionKind::forward) next.actions[rank].push_back(a);
  }
  return next;
}

}  // namespace tessera
