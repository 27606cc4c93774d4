#pragma once
// RunMeter: what the steps of a run cost on each rank, and what that comes to over all ranks.

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/flop_counter.h"
#include "tessera/train/strategy.h"

namespace tessera::detail {

/// What some steps have cost on one rank. Ranks send it to each other as it is.
struct Pace {
  double steps = 0;
  /// Time of the steps, that of reading their batches included, and of it the time in which this
  /// rank waited in calls of groups.
  double seconds = 0, waited = 0;
  /// Of all ranks: samples, or what weights count.
  double weight = 0;
  /// Of this rank: bytes of its batches, and FLOP.
  double bytes = 0, flop = 0;
  /// Most bytes so far on the device: of tensors, or on the CPU of the process.
  double memory = 0;

  void add(const Pace& other);
  double busy() const { return seconds - waited; }
};

/// Measures the steps of the thread that it was made on.
class RunMeter : Pinned {
 public:
  using Clock = std::chrono::steady_clock;
  /// `clock`: empty for Clock::now.
  RunMeter(c10::Device device, std::function<Clock::time_point()> clock);

  void begin_step();
  /// A micro-batch of this rank, with its weight as Task::weight() says.
  void batch(const MicroBatch& batch, double weight);
  /// `weight`: of all ranks. `count`: how many steps of optimizers it was.
  void end_step(double weight, std::int64_t count);
  /// There was no batch for it.
  void drop_step() { flop_.reset(); }
  /// The steps since the last call, which are forgotten.
  Pace take();
  /// All steps that take() has given.
  Pace total() const;

 private:
  Clock::time_point now() const { return clock_ ? clock_() : Clock::now(); }
  const c10::Device device_;
  const std::function<Clock::time_point()> clock_;
  const WaitTime waiting_;
  std::optional<FlopCounter> flop_;
  Clock::time_point began_;
  WaitTime::Clock::duration waited_{0};
  std::int64_t steps_ = 0;
  /// Of this rank: of the step, and FLOP of a unit of it in the last step that was counted.
  double own_weight_ = 0, flop_of_weight_ = 0;
  Pace now_, all_;
};

/// The numbers for the log, from what each rank has measured over the same steps (docs/trainer.md):
/// none without steps. `peak_flop`: of a rank, a second; 0: not known.
std::map<std::string, double> pace_values(const std::vector<Pace>& ranks, double peak_flop);
/// The same of a complete run as sentences. `seconds`: of the run; `unit`: what weights count.
std::vector<std::string> pace_lines(const std::vector<Pace>& ranks, double peak_flop,
                                    double seconds, const std::string& unit);

}  // namespace tessera::detail
