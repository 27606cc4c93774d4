#pragma once
// Stopping a run: signals that ask for it, and votes by which all ranks stop at the same place.
//
//   StopSignals signals;                       // SIGTERM and SIGUSR1, until it ends
//   PeriodicVote vote(strategy);
//   for (...) {
//     step();
//     if (vote.poll(signals.received() != Stop::none)) break;   // at the same step on every rank
//   }

#include <chrono>
#include <cstdint>
#include <string>

#include "tessera/base/pinned.h"
#include "tessera/train/strategy.h"

namespace tessera {

/// Why a run is to stop. Of several, the largest counts.
enum class Stop : unsigned char {
  none,
  /// A callback or the program asked (early stopping, a timer).
  requested,
  /// SIGUSR1: save, end, and be queued again (Slurm's --signal).
  usr1,
  /// SIGTERM: save and end.
  terminated
};
std::string to_string(Stop stop);

/// While it lives, SIGTERM and SIGUSR1 are noted instead of ending the process. Several may live at
/// once (ranks as threads): the handlers are taken back with the last one, and what was received
/// before the first is forgotten. A signal that the process ignores stays ignored.
class StopSignals : Pinned {
 public:
  StopSignals();
  ~StopSignals();
  /// What this process has received so far.
  Stop received() const;
};

/// A vote without a collective at every call: the ranks agree at each vote after how many calls the
/// next one is due, from the slowest rank's pace, so that votes are about `interval` apart.
class PeriodicVote {
 public:
  explicit PeriodicVote(Strategy& strategy,
                        std::chrono::milliseconds interval = std::chrono::seconds(1));
  /// Called by all ranks equally often. True once any rank has said so, from the same call on for
  /// all. Collective at the first call and at those that were agreed on.
  bool poll(bool mine);
  /// Collective calls so far.
  std::uint64_t votes() const { return votes_; }

 private:
  Strategy& strategy_;
  std::chrono::milliseconds interval_;
  std::chrono::steady_clock::time_point last_;
  std::uint64_t calls_since_ = 0, due_in_ = 1, votes_ = 0;
  bool mine_ = false, stopped_ = false;
};

/// Asks Slurm to queue the job again (`scontrol requeue ID`); called by the first rank after it has
/// saved. Throws Error if the command fails or is not there; its own words go to standard error.
void requeue_slurm_job(const std::string& job_id);

}  // namespace tessera
