// What the validator names: the broken schedules that PyTorch 2.15 accepts first, each by rank,
// position, action and reason.

#include "tessera/schedule/validate.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tessera/schedule/generators.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/schedule.h"

using namespace tessera;
using Kind = ScheduleFaultKind;

namespace {

// Two stages on two ranks.
PipelineSchedule of(const std::string& first, const std::string& second, int micro_batches = 2) {
  return schedule_from_table(first + "\n" + second + "\n", {0, 1}, micro_batches);
}

std::string texts(const PipelineSchedule& schedule, const ValidateOptions& options = {}) {
  std::string text;
  for (const ScheduleFault& fault : validate(schedule, options)) text += fault.text() + "\n";
  return text;
}

void expect_refused(const std::function<void()>& call, const std::string& why) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << why;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}

}  // namespace

TEST(Validate, AForwardTwice) {
  EXPECT_EQ(texts(of("0F0,0F1,0F0,0B0,0B1", "1F0,1B0,1F1,1B1")),
            "rank 0, action 2 (0F0): duplicate: it was action 0 already\n");
}

TEST(Validate, ABackwardTwice) {
  EXPECT_EQ(texts(of("0F0,0F1,0B0,0B1,0B0", "1F0,1B0,1F1,1B1")),
            "rank 0, action 4 (0B0): duplicate: it was action 2 already\n");
}

TEST(Validate, AMissingBackwardAndHalvesBesideAFullOne) {
  EXPECT_EQ(texts(of("0F0,0F1,0B0,0I0,0W0", "1F0,1B0,1F1,1B1")),
            "rank 0, action 3 (0I0): duplicate: action 2, 0B0, computes it as well\n"
            "rank 0, action 4 (0W0): duplicate: action 2, 0B0, computes it as well\n"
            "rank 0: missing: stage 0 never runs micro-batch 1 backward (B, or I and W)\n");
}

TEST(Validate, UnknownMicroBatches) {
  EXPECT_EQ(texts(of("0F7,0F8,0B7,0B8", "1F0,1B0,1F1,1B1")),
            "rank 0, action 0 (0F7): unknown: there are micro-batches 0 to 1\n"
            "rank 0, action 1 (0F8): unknown: there are micro-batches 0 to 1\n"
            "rank 0, action 2 (0B7): unknown: there are micro-batches 0 to 1\n"
            "rank 0, action 3 (0B8): unknown: there are micro-batches 0 to 1\n"
            "rank 0: missing: stage 0 never runs micro-batch 0 forward (F)\n"
            "rank 0: missing: stage 0 never runs micro-batch 0 backward (B, or I and W)\n"
            "rank 0: missing: stage 0 never runs micro-batch 1 forward (F)\n"
            "rank 0: missing: stage 0 never runs micro-batch 1 backward (B, or I and W)\n");
}

TEST(Validate, StagesThatDisagreeAboutMicroBatches) {
  EXPECT_EQ(texts(of("0F0,0F1,0B0,0B1", "1F0,1B0,1F5,1B5")),
            "rank 1, action 2 (1F5): unknown: there are micro-batches 0 to 1\n"
            "rank 1, action 3 (1B5): unknown: there are micro-batches 0 to 1\n"
            "rank 1: missing: stage 1 never runs micro-batch 1 forward (F)\n"
            "rank 1: missing: stage 1 never runs micro-batch 1 backward (B, or I and W)\n");
  // With six micro-batches 5 is one, and each stage lacks those that the other has.
  const std::string text = texts(of("0F0,0F1,0B0,0B1", "1F0,1B0,1F5,1B5", 6));
  EXPECT_NE(text.find("stage 0 never runs micro-batch 5 forward"), std::string::npos);
  EXPECT_NE(text.find("stage 1 never runs micro-batch 1 forward"), std::string::npos);
}

TEST(Validate, ADeadlockAcrossRanks) {
  // Rank 0 wants the gradient of micro-batch 1 before it gives the forward that it needs.
  EXPECT_EQ(
      texts(of("0F0,0B0,0B1,0F1", "1F0,1B0,1F1,1B1")),
      "rank 0, action 2 (0B1): order: it needs 0F1, which is action 3\n"
      "rank 0, action 2 (0B1): deadlock: rank 0 waits in action 2 (0B1) for action 3 (1B1) of "
      "rank 1; rank 1 waits in action 2 (1F1) for action 3 (0F1) of rank 0; none of them goes "
      "on\n");
  // Each rank's own order is right here.
  EXPECT_EQ(
      texts(of("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")),
      "rank 0, action 1 (0B0): deadlock: rank 0 waits in action 1 (0B0) for action 2 (1B0) of "
      "rank 1; rank 1 waits in action 1 (1F1) for action 2 (0F1) of rank 0; none of them goes "
      "on\n");
}

TEST(Validate, ADeadlockOfSendsThatWaitForTheirReceivers) {
  // Two micro-batches cross: both ranks send first.
  const PipelineSchedule crossed = of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
                                      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1");
  EXPECT_EQ(
      texts(crossed),
      "rank 0, action 3 (0SEND_F1): deadlock: rank 0 waits in action 3 (0SEND_F1) for action 4 "
      "(1RECV_F1) of rank 1; rank 1 waits in action 3 (1SEND_B0) for action 4 (0RECV_B0) of "
      "rank 0; none of them goes on\n");
  ValidateOptions buffered;
  buffered.sends = SendMode::buffered;
  EXPECT_EQ(texts(crossed, buffered), "");
}

TEST(Validate, TextThatIsNoAction) {
  const auto refused = [](const std::string& text, int column, const std::string& why) {
    try {
      schedule_from_table("0F0,0B0\n" + text + "\n", {0, 1}, 1);
      ADD_FAILURE() << text;
    } catch (const ScheduleSyntaxError& error) {
      EXPECT_EQ(error.line(), 2);
      EXPECT_EQ(error.column(), column) << error.what();
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused("2F0 garbage", 4, "expected the end of the action 2F0 instead of \" garbage\"");
  refused("2F0x", 4, "expected the end of the action 2F0 instead of \"x\"");
  refused("1F0,3B,2F0", 7, "expected a micro-batch, a number, instead of the end");
  refused("1F0,1B0 ", 8, "expected the end of the action 1B0");
  refused("1F0,1Q0", 6, "expected an action, one of F, I, W, B,");
  refused("1F0,1f0", 6, "instead of \"f0\"");
  refused("F0", 1, "expected a stage");
  refused("-1F0", 1, "expected a stage");
  refused("1F-1", 3, "expected a micro-batch");
  refused("01F0", 1, "has a zero before it");
  refused("1F99999999999999999999", 3, "is above 1048575");
  refused("1UNSHARD0", 9, "expected the end of the action 1UNSHARD");
  refused("1F0;1B0", 4, "expected the end");
  refused("\"1F0\",1B0", 1, "expected a stage");
  refused(std::string("1F0\0", 4), 4, "instead of \"\\x00\"");
}

TEST(Validate, WhatEachKindOfFaultLooksLike) {
  EXPECT_EQ(texts(of("0F0,0B0,1F0", "1B0", 1)),
            "rank 0, action 2 (1F0): wrong rank: stage 1 is on rank 1\n"
            "rank 1: missing: stage 1 never runs micro-batch 0 forward (F)\n");
  EXPECT_EQ(texts(of("0F0,0I0", "1F0,1W0", 1)),
            "rank 0, action 1 (0I0): missing: its weight gradient, 0W0, never comes\n"
            "rank 1, action 1 (1W0): missing: its input gradient, 1I0, never comes\n");
  EXPECT_EQ(texts(of("0F0,0W0,0I0", "1B0,1F0", 1)),
            "rank 0, action 1 (0W0): order: it needs 0I0, which is action 2\n"
            "rank 1, action 0 (1B0): order: it needs 1F0, which is action 1\n");
  EXPECT_EQ(texts(of("0F0,0SEND_F0,0B0", "1F0,1B0,1SEND_B0", 1)),
            "rank 1: message: 1RECV_F0 is missing: rank 0 sends it in action 1\n"
            "rank 0: message: 0RECV_B0 is missing: rank 1 sends it in action 2\n");
  EXPECT_EQ(texts(of("0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0", "1F0,1RECV_F0,1SEND_B0,1B0", 1)),
            "rank 0, action 4 (0SEND_B0): message: there is no stage before the first\n"
            "rank 1, action 0 (1F0): order: it needs 1RECV_F0, which is action 1\n"
            "rank 1, action 2 (1SEND_B0): order: it needs 1B0, which is action 3\n");
  EXPECT_EQ(texts(of("0UNSHARD,0F0,0UNSHARD,0RESHARD,0B0", "1F0,1REDUCE_GRAD,1B0,1REDUCE_GRAD", 1)),
            "rank 1, action 3 (1REDUCE_GRAD): duplicate: it was action 1 already\n"
            "rank 0, action 2 (0UNSHARD): parameters: the stage's parameters are gathered already\n"
            "rank 0, action 4 (0B0): parameters: the stage's parameters are not gathered\n"
            "rank 1, action 1 (1REDUCE_GRAD): parameters: 1B0, action 2, still adds to the "
            "gradients\n");
  EXPECT_EQ(texts(of("0F0,0UNSHARD,0B0", "1F0,1B0", 1)),
            "rank 0, action 0 (0F0): parameters: the stage's parameters are not gathered\n"
            "rank 0: parameters: the parameters of stage 0 are never released\n");
  const PipelineSchedule same_rank = schedule_from_table("0F0,0SEND_F0,1F0,1B0,0B0", {0, 0}, 1);
  EXPECT_EQ(texts(same_rank),
            "rank 0, action 1 (0SEND_F0): message: stage 1 is on the same rank: nothing is sent "
            "between them\n");
}

TEST(Validate, ShapesThatAreNoSchedule) {
  PipelineSchedule s = schedule_1f1b(2, 2);
  s.actions.emplace_back();
  EXPECT_EQ(texts(s), "shape: the placement has 2 ranks, and there are actions of 3\n");
  s = schedule_1f1b(2, 2);
  s.placement = {0, 2};
  EXPECT_NE(texts(s).find("stage 1 is placed on rank 2"), std::string::npos);
  s.placement = {};
  EXPECT_NE(texts(s).find("a placement of 0 stages"), std::string::npos);
  s = schedule_1f1b(2, 2);
  s.micro_batches = 0;
  EXPECT_NE(texts(s).find("0 micro-batches of 2 stages"), std::string::npos);
  s.micro_batches = 1 << 30;
  EXPECT_NE(texts(s).find("there must be 1 to"), std::string::npos);
  s = schedule_1f1b(2, 2);
  s.actions[0][0].kind = static_cast<ActionKind>(77);
  EXPECT_NE(texts(s).find("action 0 is of no kind"), std::string::npos);
  s = schedule_1f1b(2, 2);
  s.actions[1].push_back({ActionKind::reduce_gradient, 1, 0});
  EXPECT_NE(texts(s).find("such an action has no micro-batch"), std::string::npos);
}

TEST(Validate, MemoryLimits) {
  ValidateOptions options;
  options.memory_limit = {3};
  EXPECT_EQ(texts(schedule_gpipe(2, 4), options),
            "rank 0, action 3 (0F3): memory: the rank then holds 4, above its limit of 3\n"
            "rank 1, action 3 (1F3): memory: the rank then holds 4, above its limit of 3\n");
  EXPECT_EQ(texts(schedule_1f1b(2, 4), options), "");
  options.memory_limit = {2, 1};
  EXPECT_EQ(texts(schedule_1f1b(2, 4), options), "");
  options.memory_limit = {2, 2, 2};
  expect_refused([&] { validate(schedule_1f1b(2, 4), options); }, "3 memory limits");
  for (const double limit : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    options.memory_limit = {limit};
    expect_refused([&] { validate(schedule_1f1b(2, 4), options); }, "it must be 0 or above");
  }
  options.memory_limit = {2};
  options.costs = PipelineCosts::uniform(3);
  expect_refused([&] { validate(schedule_1f1b(2, 4), options); }, "costs of 3 stages");
}

TEST(Validate, SchedulesForEvaluation) {
  ValidateOptions options;
  options.backward = false;
  const PipelineSchedule forwards = lower(forward_only(schedule_interleaved(2, 2, 3)));
  EXPECT_EQ(texts(forwards, options), "");
  EXPECT_NE(texts(forwards).find("never runs micro-batch 0 backward"), std::string::npos);
  EXPECT_NE(texts(schedule_1f1b(2, 2), options).find("has forwards alone"), std::string::npos);
}

TEST(Validate, AllFaultsInOneError) {
  try {
    check(of("0F0,0F0,0F7,1F0", "1B1"));
    ADD_FAILURE();
  } catch (const ScheduleError& error) {
    EXPECT_EQ(error.faults().size(), 9u) << error.what();
    EXPECT_EQ(error.faults()[0].kind, Kind::duplicate);
    EXPECT_EQ(error.faults()[0].rank, 0);
    EXPECT_EQ(error.faults()[0].position, 1);
    EXPECT_EQ(to_string(*error.faults()[0].action), "0F0");
    EXPECT_NE(std::string(error.what()).find("the schedule is not valid; 9 faults:\n  rank 0,"),
              std::string::npos);
  }
  // A text with a name only makes no endless list.
  PipelineSchedule empty = schedule_1f1b(4, 1);
  empty.micro_batches = 1 << 20;
  EXPECT_EQ(validate(empty).size(), 1000u);
}
