// The known schedules: valid for all sizes, and with the bubbles and memory that their papers
// state.

#include "tessera/schedule/generators.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

using namespace tessera;

namespace {

// The makespan beyond the busiest rank's work, and the largest peak.
struct Figures {
  double waiting, peak;
};

Figures figures(const PipelineSchedule& s, double f = 1, double i = 1, double w = 1) {
  const Timeline t = simulate(s, PipelineCosts::uniform(s.stages(), f, i, w));
  return {t.makespan - t.work(), *std::ranges::max_element(t.peak)};
}

}  // namespace

TEST(Generators, AreValidForAllSizes) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 3 * p + 1; ++m) {
      for (const PipelineSchedule& s :
           {schedule_gpipe(p, m), schedule_1f1b(p, m), schedule_zero_bubble_h1(p, m),
            schedule_zero_bubble_v(p, m), schedule_interleaved(p, 1, m),
            schedule_interleaved(p, 2, m), schedule_interleaved(p, 3, m),
            schedule_gpipe(v_placement(p, 3), m)}) {
        const auto faults = validate(s);
        ASSERT_TRUE(faults.empty()) << to_string(s) << faults[0].text();
      }
    }
  }
}

TEST(Generators, WaitAsLongAsTheirPapersSay) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int m : {2 * p, 2 * p + 1, 4 * p}) {
      const double f = 1, i = 1.5, w = 0.75;
      EXPECT_DOUBLE_EQ(figures(schedule_gpipe(p, m), f, i, w).waiting, (p - 1) * (f + i + w));
      EXPECT_DOUBLE_EQ(figures(schedule_1f1b(p, m), f, i, w).waiting, (p - 1) * (f + i + w));
      // H1: (p - 1)(F + I - W); V, where all take the same: (p - 1) F of its chunks.
      EXPECT_DOUBLE_EQ(figures(schedule_zero_bubble_h1(p, m)).waiting, p - 1);
      EXPECT_DOUBLE_EQ(figures(schedule_zero_bubble_v(p, m)).waiting, p - 1);
      EXPECT_DOUBLE_EQ(figures(schedule_interleaved(p, 2, m), f, i, w).waiting,
                       (p - 1) * (f + i + w));
    }
  }
}

TEST(Generators, HoldAsMuchAsTheirPapersSay) {
  for (const int p : {2, 4, 8}) {
    const int m = 4 * p;
    EXPECT_EQ(figures(schedule_gpipe(p, m)).peak, m);
    EXPECT_EQ(figures(schedule_1f1b(p, m)).peak, p);
    EXPECT_EQ(figures(schedule_zero_bubble_h1(p, m)).peak, p);
    EXPECT_EQ(figures(schedule_zero_bubble_v(p, m)).peak, 2 * p);
    EXPECT_EQ(figures(schedule_interleaved(p, 2, m)).peak, 2 * p + p - 1);
    const auto peaks = peak_memory(schedule_1f1b(p, m), PipelineCosts::uniform(p));
    for (int r = 0; r < p; ++r) EXPECT_EQ(peaks[r], p - r);
  }
}

TEST(Generators, FewerMicroBatchesThanStages) {
  EXPECT_EQ(to_string(schedule_1f1b(3, 2)),
            "1F1B: 3 stages on 3 ranks, 2 micro-batches\n"
            "rank 0: 0F0 0F1 0B0 0B1\n"
            "rank 1: 1F0 1F1 1B0 1B1\n"
            "rank 2: 2F0 2B0 2F1 2B1\n");
}

TEST(Generators, PlacementsAndTheirErrors) {
  EXPECT_EQ(loop_placement(3, 2), (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(v_placement(3, 3), (std::vector<int>{0, 1, 2, 2, 1, 0, 0, 1, 2}));
  EXPECT_EQ(ranks_of({1, 0, 1}), 2);
  for (const std::vector<int>& bad : {std::vector<int>{}, {0, 2}, {-1, 0}, {1, 1}}) {
    EXPECT_THROW(ranks_of(bad), InvalidArgument);
  }
  EXPECT_THROW(loop_placement(0), InvalidArgument);
  EXPECT_THROW(v_placement(2, 0), InvalidArgument);
  EXPECT_THROW(loop_placement(1 << 20, 1 << 20), InvalidArgument);
  EXPECT_THROW(schedule_1f1b(2, 0), InvalidArgument);
  EXPECT_THROW(schedule_gpipe(1 << 12, 1 << 12), InvalidArgument);
  EXPECT_THROW(schedule_interleaved(2, 0, 4), InvalidArgument);
}

TEST(Generators, MessagesHaveAPeerAndATagOfTheirOwn) {
  const PipelineSchedule s = schedule_interleaved(2, 2, 3);
  const auto message = [&](const char* action) { return message_of(s, parse_action(action)); };
  // Both ends have one tag, and no two messages the same.
  EXPECT_EQ(message("0SEND_F1"), (PipelineMessage{1, message("1RECV_F1").tag}));
  EXPECT_EQ(message("1SEND_F2").peer, 0);
  EXPECT_EQ(message("3SEND_B2"), (PipelineMessage{0, message("2RECV_B2").tag}));
  std::vector<int> tags;
  for (int k = 0; k < 3; ++k) {
    for (int stage = 0; stage < 3; ++stage) {
      tags.push_back(message_of(s, {ActionKind::send_activation, stage, k}).tag);
      tags.push_back(message_of(s, {ActionKind::send_gradient, stage + 1, k}).tag);
    }
  }
  std::ranges::sort(tags);
  EXPECT_EQ(std::unique(tags.begin(), tags.end()), tags.end());
  for (const char* none : {"0SEND_B0", "3SEND_F0", "0F0", "0UNSHARD", "0SEND_F3", "4RECV_F0"}) {
    EXPECT_THROW(message(none), InvalidArgument) << none;
  }
}
