#pragma once
// One supervisor process a rank: it starts the rank, is the parent of everything the rank leaves
// behind, and ends it all when told to or when the launcher is gone. That makes "no process left"
// hold without help from the ranks, whatever sessions or daemons they create:
//
//   launcher -- control socket -- supervisor (subreaper, own session) -- rank (own process group,
//     dies with the supervisor) -- ...
//
// The launcher's death closes the socket: the supervisor kills the tree. The supervisor's death
// kills the rank (PR_SET_PDEATHSIG) and hands the orphans to the launcher, itself a subreaper. Only
// SIGKILL to both at once can leave a grandchild.

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// What one rank runs.
struct RankCommand {
  /// Program first; found by PATH.
  std::vector<std::string> arguments;
  /// "NAME=value", complete.
  std::vector<std::string> environment;
  /// Affinity; empty: as inherited.
  std::vector<int> cpus;
  /// Between SIGTERM and SIGKILL for what the rank leaves behind.
  std::int64_t grace_ms = 5000;
  /// The rank's limit of descriptors.
  rlimit descriptors{};
};

/// Supervisor to launcher.
struct SupervisorReport {
  enum Kind : int { started, not_started, ended };
  Kind kind;
  /// started: process id; not_started: errno; ended: wait status.
  int value;
  /// CLOCK_MONOTONIC.
  std::int64_t time_ns;
};

/// Launcher to supervisor: a signal for the rank's process group, or the end of everything below
/// the supervisor.
struct SupervisorCommand {
  enum Kind : int { forward, kill_all };
  Kind kind;
  int signal;
};

/// The launcher's ends of one rank.
struct SupervisedRank {
  pid_t supervisor = -1;
  /// SOCK_SEQPACKET.
  int control = -1;
  /// Reads the rank's standard output; non-blocking.
  int out = -1;
  int err = -1;
};

/// Forks the supervisor of one rank. `inherited` holds the launcher's own descriptors, which the
/// supervisor must not keep open; `mask` and `pipe_action` are the signal mask and the SIGPIPE
/// action that the rank gets. Throws Error where the system refuses.
SupervisedRank start_supervised(const RankCommand& command, const std::vector<int>& inherited,
                                const sigset_t& mask, const struct sigaction& pipe_action);

std::int64_t monotonic_ns();

}  // namespace tessera::detail
