// Schedules and costs that are drawn, times with all the digits of a double: no schedule is shorter
// than the bound, none that is made is invalid or longer than a known one, and whoever changes a
// line is found out.

#include "../support/hostile.h"
#include "draw.h"
#include "interpret.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

using namespace tessera;
using tessera::testing::Draw;
using tessera::testing::Draws;
using tessera::testing::for_seeds;
using tessera::testing::interpret;

namespace {

PipelineCosts draw_costs(Draw& draw, Draws& digits, int stages, int micro_batches) {
  PipelineCosts costs = draw.costs(stages, micro_batches);
  const double unit = digits.real(1e-6, 10);
  const auto off = [&](double& time) { time *= unit * digits.real(0.9, 1.1); };
  for (StageCosts& stage : costs.stages) {
    for (double* time : {&stage.forward, &stage.input_gradient, &stage.weight_gradient}) off(*time);
    if (stage.backward) off(*stage.backward);
  }
  for (double& time : costs.communication) off(time);
  return costs;
}

}  // namespace

TEST(HostileSchedules, NothingIsShorterThanTheBound) {
  for_seeds({}, 600, [](std::uint64_t seed) {
    Draw draw(seed);
    Draws digits(seed + 1);
    const PipelineSchedule known = draw.schedule();
    const PipelineCosts costs = draw_costs(draw, digits, known.stages(), known.micro_batches);
    const double bound = makespan_bound(known.placement, known.micro_batches, costs).makespan;
    const double length = simulate(known, costs).makespan;
    EXPECT_GE(length, bound * (1 - 1e-12)) << to_string(known);
    EXPECT_GE(simulate(lower(known), costs).makespan, bound * (1 - 1e-12)) << to_string(known);
    ListScheduleOptions options;
    options.tries = options.improvements = draw.number(1, 6);
    const PipelineSchedule made =
        list_schedule(known.placement, known.micro_batches, costs, options);
    EXPECT_TRUE(validate(made).empty()) << to_string(made);
    EXPECT_TRUE(validate(lower(made)).empty()) << to_string(made);
    EXPECT_GE(simulate(made, costs).makespan, bound * (1 - 1e-12)) << to_string(made);
    EXPECT_EQ(interpret(lower(made)),
              interpret(schedule_gpipe(made.placement, made.micro_batches)));
    EXPECT_EQ(schedule_from_csv(to_csv(made)), made);
  });
}
