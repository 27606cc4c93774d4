#include "tessera/schedule/passes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "draw.h"
#include "interpret.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

using namespace tessera;
using tessera::testing::Draw;
using tessera::testing::interpret;

namespace {

int count(const PipelineSchedule& s, ActionKind kind) {
  int n = 0;
  for (const auto& row : s.actions) {
    n +=
        static_cast<int>(std::ranges::count_if(row, [&](const auto& a) { return a.kind == kind; }));
  }
  return n;
}

std::string row(const PipelineSchedule& s, int rank) {
  std::string text;
  for (const PipelineAction& a : s.actions[rank]) text += (text.empty() ? "" : " ") + to_string(a);
  return text;
}

}  // namespace

TEST(Passes, MessagesAreWhereTheSenderHasTheValue) {
  const PipelineSchedule s = insert_messages(schedule_1f1b(2, 2));
  EXPECT_EQ(row(s, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
  EXPECT_EQ(row(s, 1), "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
}

TEST(Passes, MessagesNeverDeadlockNorCostTime) {
  Draw draw(3);
  for (int n = 0; n < 400; ++n) {
    const PipelineSchedule s = draw.schedule();
    const PipelineCosts costs = draw.costs(s.stages(), s.micro_batches);
    // Made for these times or for any others: sends that wait for their receivers end.
    const PipelineSchedule fitting = insert_messages(s, costs), other = insert_messages(s);
    check(fitting);
    check(other);
    const Timeline before = simulate(s, costs), after = simulate(fitting, costs);
    EXPECT_DOUBLE_EQ(before.makespan, after.makespan) << to_string(fitting);
    EXPECT_EQ(before.peak, after.peak);
    EXPECT_EQ(count(fitting, ActionKind::send_activation),
              count(fitting, ActionKind::receive_activation));
  }
}

TEST(Passes, GathersOnceAStepWhereThereIsRoom) {
  const PipelineSchedule s = schedule_interleaved(2, 2, 4);
  const std::vector<bool> all(4, true);
  EXPECT_EQ(count(insert_gathers(s, all), ActionKind::gather), 4);
  EXPECT_EQ(count(insert_gathers(s, {true, false, false, true}), ActionKind::gather), 2);
  const PipelineSchedule tight = insert_gathers(s, all, 1);
  check(tight);
  EXPECT_EQ(count(tight, ActionKind::gather), count(tight, ActionKind::release));
  EXPECT_GT(count(tight, ActionKind::gather), 4);
  // A gather goes on beside the action before.
  PipelineCosts costs = PipelineCosts::uniform(2);
  costs.stages[0].gather = costs.stages[1].gather = 1;
  const PipelineSchedule v =
      insert_gathers(schedule_from_table("0F0,1F0,1B0,0B0", {0, 0}, 1), {true, true});
  EXPECT_EQ(row(v, 0), "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD");
  EXPECT_EQ(simulate(v, costs).makespan, 7);
}

TEST(Passes, GathersAsSeldomAsRoomAllows) {
  // The fewest gathers with room for n stages, by trying everything.
  const auto fewest = [](const std::vector<int>& uses, int room) {
    std::vector<std::pair<std::vector<int>, int>> states{{{}, 0}};
    for (const int stage : uses) {
      std::vector<std::pair<std::vector<int>, int>> next;
      for (const auto& [here, cost] : states) {
        if (std::ranges::find(here, stage) != here.end()) {
          next.emplace_back(here, cost);
          continue;
        }
        for (std::size_t out = 0; out <= here.size(); ++out) {
          std::vector<int> then = here;
          if (out < here.size()) then.erase(then.begin() + static_cast<std::ptrdiff_t>(out));
          if (static_cast<int>(then.size()) == room) continue;
          then.push_back(stage);
          std::ranges::sort(then);
          next.emplace_back(then, cost + 1);
        }
      }
      std::ranges::sort(next);
      states.clear();
      for (const auto& state : next) {
        if (states.empty() || states.back().first != state.first) states.push_back(state);
      }
    }
    int best = 1 << 20;
    for (const auto& state : states) best = std::min(best, state.second);
    return best;
  };
  Draw draw(4);
  for (int n = 0; n < 60; ++n) {
    const int stages = draw.number(2, 4), m = draw.number(1, 4), room = draw.number(1, stages);
    // All stages on one rank, in any right order.
    const std::vector<int> placement(stages, 0);
    ListScheduleOptions options;
    options.tries = draw.number(1, 40);
    options.improvements = draw.number(0, 10);
    const PipelineSchedule s = list_schedule(placement, m, draw.costs(stages, m), options);
    std::vector<int> uses;
    for (const PipelineAction& a : s.actions[0]) uses.push_back(a.stage);
    const PipelineSchedule gathered = insert_gathers(s, std::vector<bool>(stages, true), room);
    check(gathered);
    EXPECT_EQ(count(gathered, ActionKind::gather), fewest(uses, room)) << to_string(gathered);
    int held = 0;
    for (const PipelineAction& a : gathered.actions[0]) {
      held += a.kind == ActionKind::gather ? 1 : a.kind == ActionKind::release ? -1 : 0;
      EXPECT_LE(held, room);
    }
    EXPECT_EQ(held, 0);
  }
}

TEST(Passes, GradientsAreReducedOnceAfterTheLastBackward) {
  const PipelineSchedule s =
      insert_reductions(insert_gathers(schedule_zero_bubble_h1(2, 2), {true, true}), {true, false});
  EXPECT_EQ(row(s, 0).substr(row(s, 0).size() - 25), "0W1 0RESHARD 0REDUCE_GRAD");
  EXPECT_EQ(count(s, ActionKind::reduce_gradient), 1);
  check(s);
}

TEST(Passes, StagesThatRecomputeAreNotSplit) {
  const PipelineSchedule s =
      join_backward(schedule_zero_bubble_v(3, 7), {true, false, true, true, false, true});
  check(s);
  for (const auto& actions : s.actions) {
    for (const PipelineAction& a : actions) {
      const bool whole = a.stage != 1 && a.stage != 4;
      if (a.kind == ActionKind::forward) continue;
      EXPECT_EQ(a.kind == ActionKind::backward, whole) << a;
    }
  }
}

TEST(Passes, MergedBackwardsEndNoLater) {
  Draw draw(5);
  int merged = 0;
  for (int n = 0; n < 300; ++n) {
    const int p = draw.number(1, 4), m = draw.number(1, 8);
    const PipelineSchedule s =
        draw.chance(2) ? schedule_zero_bubble_h1(p, m) : schedule_zero_bubble_v(p, m);
    const PipelineCosts costs = draw.costs(s.stages(), m);
    const PipelineSchedule once = merge_backward(s, costs);
    check(once);
    EXPECT_EQ(interpret(once), interpret(s));
    EXPECT_LE(simulate(once, costs).makespan, simulate(s, costs).makespan + 1e-12);
    merged += count(once, ActionKind::backward);
  }
  EXPECT_GT(merged, 500);
}

TEST(Passes, RefuseWhatIsThereAlready) {
  const PipelineSchedule plain = schedule_1f1b(2, 2);
  const PipelineSchedule sent = insert_messages(plain);
  EXPECT_THROW(insert_messages(sent), InvalidArgument);
  EXPECT_THROW(join_backward(sent, {true, true}), InvalidArgument);
  EXPECT_THROW(merge_backward(sent, PipelineCosts::uniform(2)), InvalidArgument);
  EXPECT_THROW(forward_only(sent), InvalidArgument);
  const PipelineSchedule gathered = insert_gathers(plain, {true, true});
  EXPECT_THROW(insert_gathers(gathered, {true, true}), InvalidArgument);
  const PipelineSchedule reduced = insert_reductions(plain, {true, true});
  EXPECT_THROW(insert_reductions(reduced, {true, true}), InvalidArgument);
  EXPECT_THROW(insert_gathers(plain, {true}), InvalidArgument);
  EXPECT_THROW(insert_gathers(plain, {true, true}, -1), InvalidArgument);
  EXPECT_THROW(insert_reductions(plain, {}), InvalidArgument);
  EXPECT_THROW(insert_messages(plain, PipelineCosts::uniform(3)), InvalidArgument);
  PipelineSchedule broken = plain;
  broken.actions[0].pop_back();
  EXPECT_THROW(lower(broken), ScheduleError);
  EXPECT_THROW(insert_gathers(broken, {true, true}), ScheduleError);
  EXPECT_THROW(insert_reductions(broken, {true, true}), ScheduleError);
  EXPECT_THROW(join_backward(broken, {true, true}), ScheduleError);
}
