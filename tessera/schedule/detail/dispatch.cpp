#include "tessera/schedule/detail/dispatch.h"

#include <algorithm>
#include <deque>
#include <limits>

namespace tessera::detail {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Ready {
  int micro_batch;
  double time;
};

// What is ready of one stage, the earliest first.
struct StageQueues {
  std::deque<Ready> forward, gradient, weight;
};

double largest_size(const PipelineCosts& costs) {
  return costs.sizes.empty() ? 1.0 : *std::ranges::max_element(costs.sizes);
}

class Pass {
 public:
  // Without priorities: by the rule.
  Pass(const DispatchProblem& problem, const std::vector<double>& limits, const DispatchRule& rule,
       const std::vector<double>* priorities, double eagerness)
      : problem_(problem),
        rule_(rule),
        priorities_(priorities),
        eagerness_(eagerness),
        largest_(largest_size(problem.costs)) {
    const int ranks = ranks_of(problem.placement);
    ranks_.resize(ranks);
    stages_.resize(problem.placement.size());
    for (int s = 0; s < stages(); ++s) {
      Rank& rank = ranks_[problem.placement[s]];
      rank.stages.push_back(s);
      rank.working = std::max(rank.working, problem.costs.stages[s].working * largest_);
      rank.all += activation(s);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      ranks_[rank].limit = limits[rank] * (1 + 1e-9) - ranks_[rank].working;
      ranks_[rank].left.assign(problem.micro_batches, static_cast<int>(ranks_[rank].stages.size()));
      ranks_[rank].waiting.assign(problem.micro_batches, ranks_[rank].all);
      ranks_[rank].of.assign(problem.micro_batches, 0.0);
    }
    for (int k = 0; k < problem.micro_batches; ++k) stages_[0].forward.push_back({k, 0.0});
    for (const StageCosts& c : problem.costs.stages)
      same_ += 1e-9 * largest_ * (c.forward + c.input_gradient + c.weight_gradient);
  }

  Dispatched run() {
    made_.starts.assign(problem_.placement.size() * problem_.micro_batches * 3, 0.0);
    std::vector<Choice> choices(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) choices[r] = choose(static_cast<int>(r));
    while (true) {
      int rank = 0;
      for (std::size_t r = 1; r < choices.size(); ++r)
        if (before(choices[r].start, choices[rank].start)) rank = static_cast<int>(r);
      if (choices[rank].start == kNever) break;
      const int receiver = commit(rank, choices[rank]);
      choices[rank] = choose(rank);
      if (receiver >= 0 && receiver != rank) choices[receiver] = choose(receiver);
    }
    for (Rank& rank : ranks_) made_.actions.push_back(std::move(rank.actions));
    return std::move(made_);
  }

 private:
  struct Choice {
    PipelineAction action;
    double start = kNever;
  };

  struct Rank {
    std::vector<int> stages;
    std::vector<PipelineAction> actions;
    double free = 0, held = 0, limit = 0, working = 0, all = 0;
    // Of each micro-batch: stages that have not ended it, and the memory of forwards to come.
    std::vector<int> left;
    std::vector<double> waiting;
    // What it holds now.
    std::vector<double> of;
    int oldest = 0;  // the first that has not ended
    bool last_was_forward = false;
  };

  int stages() const { return static_cast<int>(stages_.size()); }
  // By more than rounding: what is decided does not depend on the unit of the times.
  bool before(double a, double b) const { return a < b - same_; }
  // By the end of a backward action of a micro-batch of size 1.
  double freed(const PipelineAction& a) const {
    const StageCosts& c = problem_.costs.stages[a.stage];
    const double kept = c.kept_for_weight.value_or(c.activation);
    if (a.kind == ActionKind::backward) return c.activation;
    return a.kind == ActionKind::weight_gradient ? kept : c.activation - kept;
  }
  double activation(int s) const { return problem_.costs.stages[s].activation * largest_; }

  // A forward may start where all micro-batches can still end on this rank, one after the other in
  // their order, with what is free then and what those before them free (Dijkstra's banker). So the
  // first that has not ended can always go on. Those behind this one are as they were: when it has
  // ended, nothing is left of what it takes now.
  bool admits(const Rank& rank, int stage, int micro_batch) const {
    if (rank.limit == kNever) return true;
    const double more = activation(stage);
    double room = rank.limit - rank.held - more;
    for (int k = rank.oldest; k <= micro_batch; ++k) {
      const bool this_one = k == micro_batch;
      // Nothing of any that follows can be more.
      if (room >= rank.all) return true;
      if (rank.waiting[k] - (this_one ? more : 0) > room) return false;
      room += rank.of[k] + (this_one ? more : 0);
    }
    return true;
  }

  std::size_t index(const PipelineAction& a) const {
    const int group = a.kind == ActionKind::forward           ? 0
                      : a.kind == ActionKind::weight_gradient ? 2
                                                              : 1;
    return (static_cast<std::size_t>(group) * stages() + a.stage) * problem_.micro_batches +
           a.micro_batch;
  }

  ActionKind gradient_kind(int stage) const {
    return problem_.whole[stage] ? ActionKind::backward : ActionKind::input_gradient;
  }

  // What the rank does next, and when.
  Choice choose(int r) const { return priorities_ ? by_priority(ranks_[r]) : by_rule(r); }

  Choice by_priority(const Rank& rank) const {
    std::vector<Choice> choices;
    double first_start = kNever, first_end = kNever;
    const auto offer = [&](const std::deque<Ready>& queue, ActionKind kind, int stage) {
      if (queue.empty()) return;
      const Choice choice{{kind, stage, queue.front().micro_batch},
                          std::max(rank.free, queue.front().time)};
      if (kind == ActionKind::forward && !admits(rank, stage, choice.action.micro_batch)) return;
      first_start = std::min(first_start, choice.start);
      first_end = std::min(first_end, choice.start + problem_.costs.time(choice.action));
      choices.push_back(choice);
    };
    for (const int s : rank.stages) {
      offer(stages_[s].forward, ActionKind::forward, s);
      offer(stages_[s].gradient, gradient_kind(s), s);
      offer(stages_[s].weight, ActionKind::weight_gradient, s);
    }
    Choice best;
    const double latest = first_end - eagerness_ * (first_end - first_start);
    for (const Choice& choice : choices) {
      // Some that starts first always may.
      if (before(first_start, choice.start) && !before(choice.start, latest)) continue;
      if (best.start == kNever ||
          before((*priorities_)[index(choice.action)], (*priorities_)[index(best.action)])) {
        best = choice;
      }
    }
    return best;
  }

  Choice by_rule(int r) const {
    const Rank& rank = ranks_[r];
    Choice forward, gradient, weight;
    bool short_of_memory = false;
    double arrival = kNever;
    const auto offer = [&](Choice& best, const std::deque<Ready>& queue, ActionKind kind, int stage,
                           bool deep) {
      if (queue.empty()) return;
      const double start = std::max(rank.free, queue.front().time);
      // Ascending stages: among those that can start as early, the last or the first wins.
      if (before(start, best.start) || (deep && !before(best.start, start)))
        best = {{kind, stage, queue.front().micro_batch}, start};
    };
    for (const int s : rank.stages) {
      const StageQueues& q = stages_[s];
      if (!q.forward.empty()) {
        if (admits(rank, s, q.forward.front().micro_batch))
          offer(forward, q.forward, ActionKind::forward, s, rule_.deep_forwards);
        else if (!before(rank.free, q.forward.front().time))
          short_of_memory = true;
      }
      offer(gradient, q.gradient, gradient_kind(s), s, rule_.deep_gradients);
      offer(weight, q.weight, ActionKind::weight_gradient, s, false);
    }
    arrival = std::min(forward.start, gradient.start);
    Choice next = prefer(rank, forward, gradient);
    if (weight.start == kNever) return next;
    if (short_of_memory && before(weight.start, gradient.start)) return weight;
    const double time = problem_.costs.time(weight.action);
    if (before(weight.start + rule_.weight_patience * time, arrival)) return weight;
    return next;
  }

  Choice prefer(const Rank& rank, const Choice& forward, const Choice& gradient) const {
    if (forward.start == kNever) return gradient;
    if (gradient.start == kNever) return forward;
    bool gradients = rule_.first == DispatchRule::First::gradients;
    if (rule_.first == DispatchRule::First::alternate) gradients = rank.last_was_forward;
    const Choice& wanted = gradients ? gradient : forward;
    const Choice& other = gradients ? forward : gradient;
    const double wait = rule_.patience * problem_.costs.time(other.action);
    return before(other.start + wait, wanted.start) ? other : wanted;
  }

  // Does it; the rank that something was sent to, or -1.
  int commit(int r, const Choice& choice) {
    Rank& rank = ranks_[r];
    const PipelineAction a = choice.action;
    const double end = choice.start + problem_.costs.time(a);
    rank.free = end;
    made_.makespan = std::max(made_.makespan, end);
    made_.starts[index(a)] = choice.start;
    rank.actions.push_back(a);
    StageQueues& q = stages_[a.stage];
    int receiver = -1;
    if (a.kind == ActionKind::forward) {
      q.forward.pop_front();
      rank.held += activation(a.stage);
      rank.of[a.micro_batch] += activation(a.stage);
      rank.waiting[a.micro_batch] -= activation(a.stage);
      rank.last_was_forward = true;
      receiver = a.stage + 1 < stages() ? a.stage + 1 : -1;
      if (receiver < 0) {
        q.gradient.push_back({a.micro_batch, end});
      } else {
        stages_[receiver].forward.push_back(
            {a.micro_batch, end + problem_.costs.travel(a.stage, receiver, problem_.placement)});
      }
    } else {
      rank.last_was_forward &= a.kind == ActionKind::weight_gradient;
      const double change = freed(a) * largest_;
      rank.held -= change;
      rank.of[a.micro_batch] -= change;
      if (a.kind == ActionKind::weight_gradient) {
        q.weight.pop_front();
      } else {
        q.gradient.pop_front();
        if (a.kind == ActionKind::input_gradient) q.weight.push_back({a.micro_batch, end});
        receiver = a.stage - 1;
        if (receiver >= 0) {
          stages_[receiver].gradient.push_back(
              {a.micro_batch, end + problem_.costs.travel(a.stage, receiver, problem_.placement)});
        }
      }
      if (makes_weight_gradient(a.kind)) --rank.left[a.micro_batch];
      while (rank.oldest < problem_.micro_batches && rank.left[rank.oldest] == 0) ++rank.oldest;
    }
    return receiver < 0 ? -1 : problem_.placement[receiver];
  }

  const DispatchProblem& problem_;
  const DispatchRule rule_;
  const std::vector<double>* const priorities_;
  const double eagerness_;
  /// Times that differ by less are the same.
  double same_ = 0;
  Dispatched made_;
  double largest_;
  std::vector<Rank> ranks_;
  std::vector<StageQueues> stages_;
};

}  // namespace

Dispatched dispatch(const DispatchProblem& problem, const std::vector<double>& limits,
                    const DispatchRule& rule) {
  return Pass(problem, limits, rule, nullptr, 0).run();
}

Dispatched dispatch(const DispatchProblem& problem, const std::vector<double>& limits,
                    const std::vector<double>& priorities, double eagerness) {
  return Pass(problem, limits, {}, &priorities, eagerness).run();
}

std::vector<double> least_memory(const std::vector<int>& placement, const PipelineCosts& costs) {
  const double size = largest_size(costs);
  std::vector<double> least(ranks_of(placement), 0.0), working = least;
  for (std::size_t s = 0; s < placement.size(); ++s) {
    least[placement[s]] += costs.stages[s].activation * size;
    working[placement[s]] = std::max(working[placement[s]], costs.stages[s].working * size);
  }
  for (std::size_t r = 0; r < least.size(); ++r) least[r] += working[r];
  return least;
}

}  // namespace tessera::detail
