#pragma once
// One supervisor process per rank: it starts the rank, becomes the parent of everything the rank
// leaves behind, and ends it all when told to or when the launcher is gone. So no process is left
// behind, without help from the ranks, whatever sessions or daemons they create:
//
//   launcher -- control socket -- supervisor (subreaper, own session) -- rank (own process group,
//     dies with the supervisor) -- ...
//
// The launcher's death closes the socket: the supervisor kills the tree. The supervisor's death
// kills the rank (PR_SET_PDEATHSIG) and passes the orphans to the launcher, itself a subreaper.
// Only SIGKILL to both at once can leave a grandchild.

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// What one rank runs.
struct RankCommand {
  /// The program, searched in PATH, and its arguments.
  std::vector<std::string> arguments;
  /// The complete environment, as "NAME=value".
  std::vector<std::string> environment;
  /// CPU affinity; empty: as inherited.
  std::vector<int> cpus;
  /// Milliseconds between SIGTERM and SIGKILL for what the rank leaves behind.
  std::int64_t grace_ms = 5000;
  /// The rank's limit of descriptors.
  rlimit descriptors{};
};

/// A message from the supervisor to the launcher.
struct SupervisorReport {
  enum Kind : int { started, not_started, ended };
  Kind kind;
  /// started: process id; not_started: errno; ended: wait status.
  int value;
  /// Time by CLOCK_MONOTONIC.
  std::int64_t time_ns;
};

/// A message from the launcher to the supervisor: a signal for the rank's process group, or the end
/// of everything below the supervisor.
struct SupervisorCommand {
  enum Kind : int { forward, kill_all };
  Kind kind;
  int signal;
};

/// The launcher's descriptors of one rank.
struct SupervisedRank {
  pid_t supervisor = -1;
  /// A SOCK_SEQPACKET socket to the supervisor.
  int control = -1;
  /// The reading ends of the rank's standard output and error; non-blocking.
  int out = -1;
  int err = -1;
};

/// Forks the supervisor of one rank. `inherited` holds the launcher's own descriptors, which the
/// supervisor must not keep open; `mask` and `pipe_action` are the signal mask and the SIGPIPE
/// action that the rank gets. Throws Error if the system refuses.
SupervisedRank start_supervised(const RankCommand& command, const std::vector<int>& inherited,
                                const sigset_t& mask, const struct sigaction& pipe_action);

std::int64_t monotonic_ns();

}  // namespace tessera::detail
