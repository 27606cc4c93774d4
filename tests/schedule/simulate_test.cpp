#include "tessera/schedule/simulate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "draw.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/validate.h"

using namespace tessera;
using tessera::testing::Draw;

TEST(Simulate, TimesOfAKnownSchedule) {
  const PipelineSchedule s = schedule_1f1b(4, 8);
  const PipelineCosts costs = PipelineCosts::uniform(4);
  const Timeline t = simulate(s, costs);
  EXPECT_EQ(t.makespan, 33);
  EXPECT_EQ(t.work(), 24);
  EXPECT_DOUBLE_EQ(t.bubble(), 9.0 / 33);
  EXPECT_EQ(t.peak, (std::vector<double>{4, 3, 2, 1}));
  EXPECT_EQ(t.spans[3][0], (ActionSpan{3, 4}));
  EXPECT_EQ(
      timeline_text(schedule_1f1b(2, 2), simulate(schedule_1f1b(2, 2), PipelineCosts::uniform(2))),
      "rank 0: Ff..BB.bb\n"
      "rank 1: .FBBfbb..\n");
}

TEST(Simulate, CommunicationAndGathersGoOnBesideCompute) {
  PipelineCosts costs = PipelineCosts::uniform(2, 1, 1, 1, 0.5);
  // 0F0 to 1, there at 1.5, back at 4.5 + 0.5.
  EXPECT_EQ(simulate(schedule_1f1b(2, 1), costs).makespan, 7);
  EXPECT_EQ(simulate(lower(schedule_1f1b(2, 1)), costs).makespan, 7);
  costs.stages[0].gather = 3;
  costs.stages[0].reduce = 10;
  LowerOptions options;
  options.sharded = options.reduced = {true, false};
  EXPECT_EQ(simulate(lower(schedule_1f1b(2, 1), options), costs).makespan, 20);
}

TEST(Simulate, RecomputationIsPaidForInEachHalf) {
  PipelineCosts costs = PipelineCosts::uniform(1);
  costs.stages[0].recompute = true;
  costs.stages[0].activation = 0.25;
  costs.stages[0].working = 1;
  PipelineSchedule s = schedule_zero_bubble_h1(1, 1);
  EXPECT_EQ(simulate(s, costs).makespan, 5);
  s = join_backward(s, {true});
  EXPECT_EQ(simulate(s, costs).makespan, 4);
  EXPECT_EQ(simulate(s, costs).peak[0], 1.25);
  costs.stages[0].backward = 2.5;
  costs.sizes = {2};
  EXPECT_EQ(simulate(s, costs).makespan, 7);
  EXPECT_EQ(simulate(s, costs).peak[0], 2.5);
}

TEST(Simulate, WhatIsKeptForTheWeightGradient) {
  PipelineCosts costs = PipelineCosts::uniform(1);
  costs.stages[0].kept_for_weight = 0.25;
  PipelineSchedule s = schedule_gpipe(1, 3);
  s.actions[0] = {{ActionKind::forward, 0, 0},         {ActionKind::input_gradient, 0, 0},
                  {ActionKind::forward, 0, 1},         {ActionKind::input_gradient, 0, 1},
                  {ActionKind::forward, 0, 2},         {ActionKind::backward, 0, 2},
                  {ActionKind::weight_gradient, 0, 0}, {ActionKind::weight_gradient, 0, 1}};
  EXPECT_EQ(peak_memory(s, costs), (std::vector<double>{1.5}));
}

TEST(Simulate, RefusesWhatIsNoScheduleOrNoCosts) {
  PipelineSchedule s = schedule_1f1b(2, 2);
  const PipelineCosts good = PipelineCosts::uniform(2);
  EXPECT_THROW(simulate(s, PipelineCosts::uniform(3)), InvalidArgument);
  PipelineCosts costs = good;
  costs.stages[1].forward = -1;
  EXPECT_THROW(simulate(s, costs), InvalidArgument);
  costs = good;
  costs.stages[0].backward = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(simulate(s, costs), InvalidArgument);
  costs = good;
  costs.stages[0].kept_for_weight = 2;
  EXPECT_THROW(simulate(s, costs), InvalidArgument);
  costs = good;
  costs.communication = {1, 1};
  EXPECT_THROW(simulate(s, costs), InvalidArgument);
  costs = good;
  costs.sizes = {1};
  EXPECT_THROW(simulate(s, costs), InvalidArgument);
  const Timeline t = simulate(s, good);
  EXPECT_THROW(timeline_text(s, t, 0), InvalidArgument);
  EXPECT_THROW(timeline_text(s, t, 1, 0), InvalidArgument);
  s.actions[0].pop_back();
  EXPECT_THROW(simulate(s, good), ScheduleError);
  EXPECT_THROW(timeline_text(s, t), InvalidArgument);
  EXPECT_THROW(visualize_schedule(s, t), InvalidArgument);
}

TEST(Simulate, LongTimelinesAreTruncated) {
  const PipelineSchedule s = schedule_1f1b(2, 40);
  const std::string text = timeline_text(s, simulate(s, PipelineCosts::uniform(2)), 1e-3, 20);
  EXPECT_EQ(text, "rank 0: FFFFFFFFFFFFFFFFFFFF...\nrank 1: .......................\n");
}

TEST(Picture, IsWellFormedAndEscaped) {
  PipelineSchedule s = schedule_zero_bubble_v(2, 4);
  s.name = "<b>&\"";
  LowerOptions options;
  options.sharded.assign(4, true);
  PipelineCosts costs = PipelineCosts::uniform(4);
  costs.stages[0].gather = 0.5;
  const PipelineSchedule lowered = lower(s, options);
  const std::string svg = visualize_schedule(lowered, simulate(lowered, costs));
  EXPECT_NE(svg.find("&lt;b&gt;&amp;&quot;: 4 stages"), std::string::npos);
  EXPECT_EQ(svg.find("<b>"), std::string::npos);
  EXPECT_NE(svg.find("<title>0UNSHARD</title>"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  // Nothing takes time: nothing is divided by it.
  PipelineCosts free = PipelineCosts::uniform(4, 0, 0, 0);
  EXPECT_EQ(visualize_schedule(s, simulate(s, free)).find("nan"), std::string::npos);
}

TEST(Bound, OfEqualStages) {
  EXPECT_EQ(makespan_bound(loop_placement(4), 8, PipelineCosts::uniform(4)).makespan, 27);
  // Whatever the placement: (p - 1) forward chunks, and the work.
  for (const int p : {2, 4, 8}) {
    for (const auto& placement : {loop_placement(p), loop_placement(p, 2), v_placement(p)}) {
      const int chunks = static_cast<int>(placement.size()) / p, m = 4 * p;
      for (const double i : {1.0, 1.25, 1.5}) {
        const auto costs = PipelineCosts::uniform(chunks * p, 1, i, 0.5);
        const MakespanBound bound = makespan_bound(placement, m, costs);
        EXPECT_DOUBLE_EQ(bound.makespan, p - 1 + m * chunks * (1.5 + i));
        EXPECT_DOUBLE_EQ(bound.work, m * chunks * (1.5 + i));
      }
    }
  }
  // One micro-batch: there and back, and the last weight gradient.
  EXPECT_DOUBLE_EQ(
      makespan_bound(v_placement(2), 1, PipelineCosts::uniform(4, 1, 1.5, .5, .25)).makespan,
      4 + 6 + 0.5 + 4 * 0.25);
  EXPECT_THROW(makespan_bound({0}, 0, PipelineCosts::uniform(1)), InvalidArgument);
  EXPECT_THROW(makespan_bound({1}, 1, PipelineCosts::uniform(1)), InvalidArgument);
}

// Differences of rounded sums come out below zero.
TEST(Bound, OfTimesThatAreNoBinaryFractions) {
  PipelineCosts costs = PipelineCosts::uniform(2);
  costs.stages[0].forward = 0.3, costs.stages[1].forward = 0.4;
  for (StageCosts& c : costs.stages) c.input_gradient = c.weight_gradient = 0.1;
  EXPECT_DOUBLE_EQ(makespan_bound({0, 0}, 1, costs).makespan, 1.1);
  // One unit or another: the same bound.
  Draw draw(8);
  for (int n = 0; n < 400; ++n) {
    const int ranks = draw.number(1, 4), stages = ranks + draw.number(0, 4), m = draw.number(1, 6);
    const auto placement = draw.chance(2) ? v_placement(ranks) : draw.placement(ranks, stages);
    const auto count = static_cast<int>(placement.size());
    PipelineCosts ones = draw.costs(count, 0), tenths;
    const auto whole = [](double& time) { time = std::round(time * 10); };
    for (StageCosts& c : ones.stages) {
      c.backward.reset();
      for (double* time : {&c.forward, &c.input_gradient, &c.weight_gradient}) whole(*time);
    }
    for (double& time : ones.communication) whole(time);
    ones.sizes.clear();
    tenths = ones;
    for (StageCosts& c : tenths.stages)
      for (double* time : {&c.forward, &c.input_gradient, &c.weight_gradient}) *time /= 10;
    for (double& time : tenths.communication) time /= 10;
    const double expected = makespan_bound(placement, m, ones).makespan;
    EXPECT_NEAR(makespan_bound(placement, m, tenths).makespan * 10, expected, 1e-9 * expected);
    ListScheduleOptions options;
    options.tries = options.improvements = 20;
    const double shortest = simulate(list_schedule(placement, m, ones, options), ones).makespan;
    const double other = simulate(list_schedule(placement, m, tenths, options), tenths).makespan;
    EXPECT_NEAR(other * 10, shortest, 1e-9 * shortest) << "list schedule " << n;
  }
}
