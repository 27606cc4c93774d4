// The list scheduler beside the bound, beside the known schedules, and, where that can be had,
// beside the best of all schedules.

#include "tessera/schedule/list_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "draw.h"
#include "interpret.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

using namespace tessera;
using tessera::testing::Draw;

namespace {

// The shortest schedule of all, by trying every order: some schedule among the best starts no
// action later than it could, so that what is tried is which rank does what next.
class Exhaustive {
 public:
  Exhaustive(const std::vector<int>& placement, int micro_batches, const PipelineCosts& costs)
      : placement_(placement),
        m_(micro_batches),
        costs_(costs),
        free_(ranks_of(placement), 0.0),
        ends_(placement.size() * micro_batches * 3, -1.0) {}

  double run(double start) {
    best_ = start;
    go(0);
    return best_;
  }

 private:
  int stages() const { return static_cast<int>(placement_.size()); }
  double& end(int kind, int s, int k) { return ends_[(kind * stages() + s) * m_ + k]; }
  bool whole(int s) const { return costs_.stages[s].recompute; }

  // When the value that an action needs is there; negative: not known yet.
  double input(int kind, int s, int k) {
    if (kind == 0) {
      if (s == 0) return k == 0 || end(0, 0, k - 1) >= 0 ? 0 : -1;  // micro-batches are alike
      const double before = end(0, s - 1, k);
      return before < 0 ? -1 : before + costs_.travel(s - 1, s, placement_);
    }
    if (kind == 2) return whole(s) ? -1 : end(1, s, k);
    if (s + 1 == stages()) return end(0, s, k);
    if (end(1, s + 1, k) < 0) return -1;
    return std::max(end(0, s, k), end(1, s + 1, k) + costs_.travel(s + 1, s, placement_));
  }

  double time(int kind, int s, int k) const {
    const ActionKind kinds[] = {ActionKind::forward,
                                whole(s) ? ActionKind::backward : ActionKind::input_gradient,
                                ActionKind::weight_gradient};
    return costs_.time({kinds[kind], s, k});
  }

  void go(double makespan) {
    // No rank can do better than to go on without waiting.
    std::vector<double> left = free_;
    bool done = true;
    for (int kind = 0; kind < 3; ++kind) {
      for (int s = 0; s < stages(); ++s) {
        for (int k = 0; k < m_; ++k) {
          if (end(kind, s, k) >= 0 || (kind == 2 && whole(s))) continue;
          done = false;
          left[placement_[s]] += time(kind, s, k);
        }
      }
    }
    if (*std::ranges::max_element(left) >= best_ - 1e-9 || makespan >= best_ - 1e-9) return;
    if (done) {
      best_ = makespan;
      return;
    }
    if (!seen_.insert({free_, ends_}).second) return;
    // The action that could end first: on its rank one of those that could start before that is
    // next (Giffler and Thompson 1960).
    int rank = -1;
    double first = 1e300;
    for (int kind = 0; kind < 3; ++kind) {
      for (int s = 0; s < stages(); ++s) {
        for (int k = 0; k < m_; ++k) {
          if (end(kind, s, k) >= 0 || (kind == 2 && whole(s)) || input(kind, s, k) < 0) continue;
          const double ends = std::max(free_[placement_[s]], input(kind, s, k)) + time(kind, s, k);
          if (ends < first) {
            first = ends;
            rank = placement_[s];
          }
        }
      }
    }
    for (int kind = 0; kind < 3; ++kind) {
      for (int s = 0; s < stages(); ++s) {
        if (placement_[s] != rank) continue;
        for (int k = 0; k < m_; ++k) {
          if (end(kind, s, k) >= 0 || (kind == 2 && whole(s)) || input(kind, s, k) < 0) continue;
          const double start = std::max(free_[rank], input(kind, s, k));
          if (start >= first - 1e-12) continue;
          const double before = free_[rank];
          end(kind, s, k) = free_[rank] = start + time(kind, s, k);
          go(std::max(makespan, free_[rank]));
          free_[rank] = before;
          end(kind, s, k) = -1;
        }
      }
    }
  }

  const std::vector<int>& placement_;
  int m_;
  const PipelineCosts& costs_;
  std::vector<double> free_, ends_;
  std::set<std::pair<std::vector<double>, std::vector<double>>> seen_;
  double best_ = 0;
};

double makespan(const PipelineSchedule& s, const PipelineCosts& costs) {
  return simulate(s, costs).makespan;
}

}  // namespace

TEST(ListSchedule, WithinTwoPercentOfTheBoundOnTheGrid) {
  for (const int p : {2, 4, 8}) {
    for (const int m : {p, p + 1, 3 * p / 2, 2 * p, 3 * p, 4 * p}) {
      for (const double i : {1.0, 1.25, 1.5}) {
        for (const double w : {0.5, 0.75, 1.0}) {
          for (const auto& placement : {loop_placement(p), v_placement(p)}) {
            const auto costs = PipelineCosts::uniform(static_cast<int>(placement.size()), 1, i, w);
            ListScheduleOptions options;
            options.target = 1.02;
            const auto s = list_schedule(placement, m, costs, options);
            EXPECT_LE(makespan(s, costs), 1.02 * makespan_bound(placement, m, costs).makespan)
                << "p " << p << ", m " << m << ", I " << i << ", W " << w << ", "
                << placement.size() << " stages";
          }
        }
      }
    }
  }
}

TEST(ListSchedule, IsNeverWorseThanTheKnownOnesUnderALimit) {
  for (const int p : {2, 4}) {
    for (const int m : {p - 1, p, 2 * p, 3 * p + 1}) {
      for (const double limit : {0.75, 1.0, 1.5, 4.0}) {
        for (const auto& [i, w, c] :
             {std::tuple{1.0, 1.0, 0.0}, {1.5, 0.5, 0.25}, {1.25, 1.0, 1.0}}) {
          for (const PipelineSchedule& known :
               {schedule_gpipe(p, m), schedule_1f1b(p, m), schedule_zero_bubble_h1(p, m),
                schedule_interleaved(p, 2, m), schedule_zero_bubble_v(p, m)}) {
            const auto costs = PipelineCosts::uniform(known.stages(), 1, i, w, c);
            ListScheduleOptions options;
            options.tries = options.improvements = 40;
            options.memory_limit = {std::max(1.0, limit * p) * known.stages() / p};
            const PipelineSchedule s = list_schedule(known.placement, m, costs, options);
            ValidateOptions checked;
            checked.memory_limit = options.memory_limit;
            checked.costs = costs;
            check(s, checked);
            if (!validate(known, checked).empty()) continue;
            EXPECT_LE(makespan(s, costs), makespan(known, costs) + 1e-9) << known.name;
          }
        }
      }
    }
  }
}

TEST(ListSchedule, DrawnCostsAndLimits) {
  Draw draw(6);
  for (int n = 0; n < 400; ++n) {
    const int ranks = draw.number(1, 4), stages = ranks + draw.number(0, 4), m = draw.number(1, 9);
    const auto placement = draw.placement(ranks, stages);
    const PipelineCosts costs = draw.costs(stages, m);
    ListScheduleOptions options;
    options.tries = options.improvements = draw.number(1, 30);
    // What one micro-batch needs, or more.
    double least = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      double held = 0, working = 0;
      for (int s = 0; s < stages; ++s) {
        if (placement[s] != rank) continue;
        held += costs.stages[s].activation;
        working = std::max(working, costs.stages[s].working);
      }
      least = std::max(least, held + working);
    }
    if (!costs.sizes.empty()) least *= *std::ranges::max_element(costs.sizes);
    const double limit = least * (draw.chance(2) ? 1 : draw.time(1, 3));
    options.memory_limit = {limit};
    const PipelineSchedule s = list_schedule(placement, m, costs, options);
    ValidateOptions checked;
    checked.memory_limit = {limit};
    checked.costs = costs;
    check(s, checked);
    const Timeline t = simulate(s, costs);
    EXPECT_GE(t.makespan, makespan_bound(placement, m, costs).makespan * (1 - 1e-12))
        << to_string(s);
    for (const auto& row : s.actions) {
      for (const PipelineAction& a : row) {
        if (costs.stages[a.stage].recompute) {
          EXPECT_TRUE(a.kind == ActionKind::forward || a.kind == ActionKind::backward) << a;
        }
      }
    }
    options.memory_limit = {least * 0.5};
    EXPECT_THROW(list_schedule(placement, m, costs, options), InvalidArgument);
  }
}

TEST(ListSchedule, ImprovementsShortenWhatTheRulesFind) {
  Draw draw(8);
  int shorter = 0;
  for (int n = 0; n < 40; ++n) {
    const int ranks = draw.number(2, 4), stages = ranks + draw.number(0, 4), m = draw.number(3, 9);
    const auto placement = draw.placement(ranks, stages);
    const PipelineCosts costs = draw.costs(stages, m);
    ListScheduleOptions options;
    options.improvements = 0;
    const double without = makespan(list_schedule(placement, m, costs, options), costs);
    options.improvements = 100;
    const double with = makespan(list_schedule(placement, m, costs, options), costs);
    EXPECT_LE(with, without * (1 + 1e-9));
    shorter += with < without * (1 - 1e-6) ? 1 : 0;
  }
  EXPECT_GE(shorter, 2);
}

TEST(ListSchedule, BesideTheBestOfAll) {
  // Everything is tried: the bound is below the best, and the list schedule is the best or near it.
  Draw draw(7);
  double ours = 0, best = 0;
  int exact = 0, cases = 0;
  for (int n = 0; n < 100; ++n) {
    const bool two = draw.chance(2);
    auto placement = two ? (draw.chance(2) ? v_placement(2) : loop_placement(2, 2))
                         : loop_placement(draw.number(2, 3));
    if (draw.chance(4)) placement = draw.placement(2, draw.number(2, 4));
    const int stages = static_cast<int>(placement.size()), m = stages > 3 ? 2 : draw.number(2, 3);
    PipelineCosts costs = PipelineCosts::uniform(stages, 1, draw.time(1, 1.5), draw.time(0.5, 1),
                                                 draw.chance(2) ? 0.3 : 0.0);
    if (draw.chance(3)) costs.stages[draw.number(0, stages - 1)].recompute = true;
    // Stages need not be alike, and may lie anywhere.
    for (StageCosts& stage : costs.stages) {
      if (!draw.chance(2)) continue;
      stage.forward = draw.time(0.5, 2);
      stage.input_gradient = draw.time(0.5, 2);
    }
    const PipelineSchedule s = list_schedule(placement, m, costs);
    const double length = makespan(s, costs);
    // It has to find the way down from the longest schedule.
    const double longest = makespan(schedule_gpipe(placement, m), costs) + 1e-6;
    const double shortest = Exhaustive(placement, m, costs).run(longest);
    ASSERT_GE(shortest, makespan_bound(placement, m, costs).makespan * (1 - 1e-12));
    ASSERT_LE(shortest, length + 1e-6);
    EXPECT_LE(length, 1.05 * shortest) << to_string(s);
    ours += length;
    best += shortest;
    exact += length <= shortest + 1e-6 ? 1 : 0;
    ++cases;
  }
  EXPECT_LE(ours, 1.01 * best);
  EXPECT_GE(exact, cases * 19 / 20);
}

TEST(ListSchedule, RefusesWhatItCannotDo) {
  const auto costs = PipelineCosts::uniform(2);
  ListScheduleOptions options;
  options.memory_limit = {0.5};
  EXPECT_THROW(list_schedule(loop_placement(2), 2, costs, options), InvalidArgument);
  options.memory_limit = {1, 1, 1};
  EXPECT_THROW(list_schedule(loop_placement(2), 2, costs, options), InvalidArgument);
  options = {};
  options.tries = 0;
  EXPECT_THROW(list_schedule(loop_placement(2), 2, costs, options), InvalidArgument);
  options = {};
  options.target = 0.5;
  EXPECT_THROW(list_schedule(loop_placement(2), 2, costs, options), InvalidArgument);
  EXPECT_THROW(list_schedule(loop_placement(2), 0, costs), InvalidArgument);
  EXPECT_THROW(list_schedule(loop_placement(3), 2, costs), InvalidArgument);
}
