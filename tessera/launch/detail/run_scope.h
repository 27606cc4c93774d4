#pragma once
// What the local launcher holds during a run: a port, the process' signals, and the environment of
// its ranks.

#include <signal.h>
#include <sys/resource.h>

#include <string>
#include <vector>

#include "tessera/base/internal/descriptor.h"
#include "tessera/base/pinned.h"
#include "tessera/launch/local_run.h"

namespace tessera::detail {

/// "127.0.0.1", or "::1" on a host without IPv4. Throws Error if there is no loopback address.
std::string loopback_address();

/// A reserved port of loopback_address(): bound with SO_REUSEADDR and never listening, so that no
/// process gets it by chance, while a listener that sets SO_REUSEADDR itself (the stores of
/// libtorch do) can take it. The constructor throws Error if there is none.
class ReservedPort : Pinned {
 public:
  ReservedPort();
  int fd() const { return fd_.get(); }
  const std::string& address() const { return address_; }
  int port() const { return port_; }

 private:
  std::string address_;
  Descriptor fd_;
  int port_ = 0;
};

/// While it lives, signals are read from a descriptor, SIGPIPE is ignored and orphans become this
/// process' children; the earlier settings are restored at the end. Signals that were ignored stay
/// ignored: while they are blocked, the system would queue them all the same.
class SignalScope : Pinned {
 public:
  SignalScope();
  ~SignalScope();
  /// A signalfd, non-blocking.
  int fd() const { return fd_; }
  /// The settings from before.
  const sigset_t& mask() const { return mask_; }
  const struct sigaction& pipe_action() const { return pipe_action_; }

 private:
  int fd_ = -1;
  int subreaper_ = 0;
  sigset_t mask_{};
  struct sigaction pipe_action_{};
  struct sigaction child_action_{};
};

/// While it lives, the soft limit of descriptors is the hard one: a rank takes four of them, or six
/// with log files.
class DescriptorScope : Pinned {
 public:
  DescriptorScope();
  ~DescriptorScope();
  const rlimit& before() const { return before_; }

 private:
  rlimit before_{};
};

/// The variables that all ranks of a run share, as "NAME=value": this process' environment without
/// the variables by which an outer launcher numbers its own processes, and the variables of
/// docs/launching.md. `columns`: width of the terminal that the ranks' standard error ends on; 0:
/// none.
std::vector<std::string> shared_environment(const LocalRun& run, int usable_cores,
                                            const ReservedPort& port, int columns);

}  // namespace tessera::detail
