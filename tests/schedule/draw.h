#pragma once
// Drawn schedules for property tests. Raw engine output alone, so that cases are the same
// everywhere.

#include <random>

#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"
#include "tessera/schedule/passes.h"

namespace tessera::testing {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high].
  int number(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(int one_in) { return number(1, one_in) == 1; }
  /// In tenths, of which most are no binary fractions: sums are rounded, as those of measured times
  /// are.
  double time(double low, double high) {
    return number(static_cast<int>(low * 10), static_cast<int>(high * 10)) / 10.0;
  }

  /// Any placement in which no rank is empty.
  std::vector<int> placement(int ranks, int stages) {
    std::vector<int> placement(stages);
    for (int s = 0; s < stages; ++s) placement[s] = s < ranks ? s : number(0, ranks - 1);
    for (int i = stages - 1; i > 0; --i) std::swap(placement[i], placement[number(0, i)]);
    return placement;
  }

  PipelineCosts costs(int stages, int micro_batches) {
    PipelineCosts costs;
    for (int s = 0; s < stages; ++s) {
      StageCosts c;
      c.forward = time(0.5, 2);
      c.input_gradient = time(0.5, 2);
      c.weight_gradient = time(0, 2);
      c.activation = time(0.5, 2);
      c.recompute = chance(4);
      if (chance(4)) c.backward = c.forward + time(0.5, 2);
      if (chance(4)) c.kept_for_weight = c.activation / 2;
      if (chance(4)) c.working = time(0, 1);
      costs.stages.push_back(c);
    }
    if (chance(2)) {
      for (int s = 0; s + 1 < stages; ++s) costs.communication.push_back(time(0, 1));
    }
    if (chance(4)) {
      for (int k = 0; k < micro_batches; ++k) costs.sizes.push_back(time(0.5, 2));
    }
    return costs;
  }

  /// Of any kind.
  PipelineSchedule schedule() {
    const int ranks = number(1, 5), m = number(1, 9);
    switch (number(0, 6)) {
      case 0:
        return schedule_gpipe(placement(ranks, ranks + number(0, 4)), m);
      case 1:
        return schedule_1f1b(ranks, m);
      case 2:
        return schedule_interleaved(ranks, number(1, 3), m);
      case 3:
        return schedule_zero_bubble_h1(ranks, m);
      case 4:
        return schedule_zero_bubble_v(ranks, m);
      default: {
        const int stages = ranks + number(0, 4);
        ListScheduleOptions options;
        options.tries = options.improvements = 3;
        options.split_backward = !chance(4);
        return list_schedule(placement(ranks, stages), m, costs(stages, m), options);
      }
    }
  }

  std::vector<bool> flags(int count) {
    std::vector<bool> flags(count);
    for (int i = 0; i < count; ++i) flags[i] = chance(2);
    return flags;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
