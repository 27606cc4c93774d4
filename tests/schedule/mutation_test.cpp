// Drawn schedules, and what becomes of them when somebody changes a line: the validator must say
// exactly what a run in whole numbers says.

#include <gtest/gtest.h>

#include "draw.h"
#include "interpret.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/validate.h"

using namespace tessera;
using tessera::testing::Draw;
using tessera::testing::interpret;

namespace {

std::string shown(const std::vector<ScheduleFault>& faults) {
  std::string text;
  for (const ScheduleFault& fault : faults) text += fault.text() + "\n";
  return text;
}

PipelineSchedule draw_lowered(Draw& draw) {
  const PipelineSchedule schedule = draw.schedule();
  LowerOptions options;
  if (draw.chance(2)) {
    options.sharded = draw.flags(schedule.stages());
    options.gathered_at_once = draw.number(0, 2);
  }
  if (draw.chance(2)) options.reduced = draw.flags(schedule.stages());
  return draw.chance(3) ? schedule : lower(schedule, options);
}

// One change, of any kind.
void mutate(Draw& draw, PipelineSchedule& s) {
  int rank = draw.number(0, s.ranks() - 1);
  while (s.actions[rank].empty()) rank = (rank + 1) % s.ranks();
  auto& row = s.actions[rank];
  const int last = static_cast<int>(row.size()) - 1;
  const int i = draw.number(0, last), j = draw.number(0, last);
  switch (draw.number(0, 6)) {
    case 0:
      row.erase(row.begin() + i);
      break;
    case 1:
      row.insert(row.begin() + j, PipelineAction(row[i]));
      break;
    case 2:
      std::swap(row[i], row[j]);
      break;
    case 3:
      std::swap(row[i], row[std::min(i + 1, last)]);
      break;
    case 4:
      row[i].micro_batch += has_micro_batch(row[i].kind) ? draw.number(-1, 1) : 0;
      break;
    case 5:
      row[i].stage += draw.number(-1, 1);
      break;
    default: {
      const auto kind = static_cast<ActionKind>(draw.number(0, 10));
      row[i].kind = kind;
      row[i].micro_batch = has_micro_batch(kind) ? std::max(row[i].micro_batch, 0) : -1;
    }
  }
}

}  // namespace

TEST(Mutations, EveryDrawnScheduleIsValidAndComputesTheSame) {
  Draw draw(1);
  for (int n = 0; n < 1500; ++n) {
    const PipelineSchedule schedule = draw_lowered(draw);
    const auto faults = validate(schedule);
    ASSERT_TRUE(faults.empty()) << to_string(schedule) << shown(faults);
    const auto sums = interpret(schedule);
    ASSERT_TRUE(sums) << to_string(schedule);
    const auto reference = interpret(schedule_gpipe(schedule.placement, schedule.micro_batches));
    ASSERT_EQ(sums, reference) << to_string(schedule);
    ASSERT_EQ(schedule_from_csv(to_csv(schedule)), schedule);
  }
}

TEST(Mutations, AChangedScheduleIsRefusedExactlyWhereItDoesNotRun) {
  Draw draw(2);
  int refused = 0, same = 0;
  for (int n = 0; n < 8000; ++n) {
    PipelineSchedule schedule = draw_lowered(draw);
    for (int changes = draw.chance(4) ? 2 : 1; changes > 0; --changes) mutate(draw, schedule);
    const auto faults = validate(schedule);
    const bool runs = interpret(schedule).has_value();
    ASSERT_EQ(faults.empty(), runs) << to_string(schedule) << shown(faults);
    (runs ? same : refused) += 1;
    if (runs) {
      ASSERT_EQ(interpret(schedule),
                interpret(schedule_gpipe(schedule.placement, schedule.micro_batches)));
    }
    for (const ScheduleFault& fault : faults) ASSERT_FALSE(fault.why.empty());
  }
  EXPECT_GT(refused, 4000);
  EXPECT_GT(same, 300);
}
