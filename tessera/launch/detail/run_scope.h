#pragma once
// What the local launcher holds for the time of a run: a port, the process' signals, and the
// environment of its ranks.

#include <signal.h>

#include <string>
#include <vector>

#include "tessera/launch/local_run.h"

namespace tessera::detail {

/// A loopback port, reserved: bound with SO_REUSEADDR and never listening, so that nobody gets it
/// by chance, while a listener that sets SO_REUSEADDR itself (the stores of libtorch do) can take
/// it. Throws Error where there is none.
class ReservedPort {
 public:
  ReservedPort();
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;
  int fd() const { return fd_; }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

/// Signals come through a descriptor, SIGPIPE is ignored and orphans are this process' children;
/// the settings from before come back at the end.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  /// A signalfd, non-blocking.
  int fd() const { return fd_; }
  /// From before.
  const sigset_t& mask() const { return mask_; }
  const struct sigaction& pipe_action() const { return pipe_action_; }

 private:
  int fd_ = -1;
  int subreaper_ = 0;
  sigset_t mask_{};
  struct sigaction pipe_action_{};
  struct sigaction child_action_{};
};

/// "NAME=value" of everything that the ranks of a run share: this process' environment without the
/// variables by which an outer launcher numbers its own processes, and the variables of
/// docs/launching.md. `columns`: of the terminal that the ranks' standard error ends on; 0: none.
std::vector<std::string> shared_environment(const LocalRun& run, int usable_cores, int port,
                                            int columns);

}  // namespace tessera::detail
