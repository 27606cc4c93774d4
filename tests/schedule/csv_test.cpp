#include "tessera/schedule/schedule.h"

#include <gtest/gtest.h>

#include "tessera/schedule/generators.h"
#include "tessera/schedule/passes.h"

using namespace tessera;

namespace {

const char* const kText =
    "schedule,1,1F1B\n"
    "micro_batches,2\n"
    "placement,0,1\n"
    "0F0,0F1,0B0,0B1\n"
    "1F0,1B0,1F1,1B1\n";

void refused(const std::string& text, int line, int column, const std::string& why) {
  try {
    schedule_from_csv(text);
    ADD_FAILURE() << "not refused: " << text;
  } catch (const ScheduleSyntaxError& error) {
    EXPECT_EQ(error.line(), line) << error.what();
    EXPECT_EQ(error.column(), column) << error.what();
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}

}  // namespace

TEST(Csv, GoesThereAndBack) {
  EXPECT_EQ(to_csv(schedule_1f1b(2, 2)), kText);
  EXPECT_EQ(schedule_from_csv(kText), schedule_1f1b(2, 2));
  LowerOptions options;
  options.sharded = options.reduced = {true, false, true, true};
  options.gathered_at_once = 1;
  const PipelineSchedule lowered = lower(schedule_interleaved(2, 2, 3), options);
  EXPECT_EQ(schedule_from_csv(to_csv(lowered)), lowered);
  // Line ends of other systems, and none at the end.
  std::string text = kText;
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) {
    text.replace(at, 1, "\r\n");
  }
  EXPECT_EQ(schedule_from_csv(text), schedule_1f1b(2, 2));
  text = kText;
  text.pop_back();
  EXPECT_EQ(schedule_from_csv(text), schedule_1f1b(2, 2));
}

TEST(Csv, ARankWithoutActionsIsAnEmptyLine) {
  PipelineSchedule s = schedule_1f1b(2, 1);
  s.actions[1].clear();
  EXPECT_EQ(schedule_from_csv(to_csv(s)), s);
}

TEST(Csv, EveryFaultHasItsPlace) {
  refused("", 1, 1, "expected \"schedule,1,NAME\" instead of the end");
  refused("schedule,2,x\n", 1, 1, "expected \"schedule,1,\" instead of \"schedule,2,x\"");
  refused("schedule,1,a,b\n", 1, 13, "expected the end of the name");
  refused("schedule,1,x\n", 2, 1, "expected \"micro_batches,NUMBER\"");
  refused("schedule,1,x\nmicro_batches,2 \n", 2, 16, "expected the line's end");
  refused("schedule,1,x\nmicro_batches,\n", 2, 15, "the number of micro-batches, a number");
  refused("schedule,1,x\nmicro_batches,2\nplacement,0,1,\n", 3, 15, "expected a rank");
  refused("schedule,1,x\nmicro_batches,2\nplacement,0;1\n", 3, 12, "expected \",\"");
  refused("schedule,1,x\nmicro_batches,2\nplacement,0,1\n0F0\n", 5, 1,
          "the actions of rank 1 of 2");
  refused(std::string(kText) + "\n", 6, 1, "expected the end: the placement has 2 ranks");
  refused("schedule,1,x\nmicro_batches,1\nplacement,0\n0F0,0B0,\n", 4, 9, "the end after a comma");
  refused("schedule,1,x\nmicro_batches,1\nplacement,0\n0F0,,0B0\n", 4, 5, "instead of \",\"");
  refused("schedule,1,x\nmicro_batches,1\nplacement,0\n,0F0,0B0\n", 4, 1, "expected an action");
  EXPECT_THROW(schedule_from_csv("schedule,1,x\nmicro_batches,1\nplacement,1\n0F0\n"),
               InvalidArgument);
}

TEST(Csv, TablesOfOthersMayHaveBubbles) {
  const PipelineSchedule s =
      schedule_from_table("0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,\r\n", {0, 1}, 2);
  EXPECT_EQ(s.actions, schedule_1f1b(2, 2).actions);
}

TEST(Csv, WhatIsTooMuchIsRefused) {
  CsvLimits limits;
  limits.bytes = 10;
  EXPECT_THROW(schedule_from_csv(kText, limits), InvalidArgument);
  limits = {};
  limits.actions = 3;
  EXPECT_THROW(schedule_from_csv(kText, limits), ScheduleSyntaxError);
  PipelineSchedule named = schedule_1f1b(2, 2);
  for (const char* name : {"a,b", "a\nb", "a\"b"}) {
    named.name = name;
    EXPECT_THROW(to_csv(named), InvalidArgument);
  }
}

TEST(Csv, EveryTextIsReadOrRefused) {
  // One byte changed at each place, to each of some: never another error, never a crash.
  const std::string text = to_csv(lower(schedule_1f1b(2, 2)));
  int refusals = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const char c : {'\0', '\n', ',', '0', '9', 'F', '_', '\xff', ' '}) {
      std::string changed = text;
      changed[i] = c;
      try {
        schedule_from_csv(changed);
      } catch (const InvalidArgument&) {
        ++refusals;
      }
    }
  }
  EXPECT_GT(refusals, 1000);
}
