#pragma once
// Which ranks' processes are still running. A pidfd refers to the process itself: neither children
// that it forked and that hold its descriptors matter, nor a process number that the system has
// reused.

#include <sys/types.h>
#include <unistd.h>

#include <vector>

#include "tessera/shm/detail/segment.h"

namespace tessera::shm::detail {

class Liveness {
 public:
  Liveness() = default;
  /// One pidfd per rank; an empty one for ranks of this process.
  explicit Liveness(std::vector<Descriptor> processes);

  /// True once the rank's process has ended; it stays true.
  bool gone(int rank) const { return !gone_.empty() && gone_[static_cast<std::size_t>(rank)]; }
  /// Asks the kernel about all ranks; true if any has ended since the last time.
  bool look();
  /// The process number as this process sees it; 0 if it does not see it, this process' own if the
  /// rank is one of its threads.
  pid_t process(int rank) const {
    return numbers_.empty() ? own_ : numbers_[static_cast<std::size_t>(rank)];
  }
  /// True if the rank is a thread of this process, or this rank itself.
  bool own(int rank) const {
    return processes_.empty() || numbers_[static_cast<std::size_t>(rank)] == own_;
  }
  /// "is alive", "is stopped", "has ended".
  const char* state(int rank) const;

 private:
  std::vector<Descriptor> processes_;
  std::vector<bool> gone_;
  std::vector<pid_t> numbers_;
  pid_t own_ = ::getpid();
};

/// The number, in this process' namespace, of the process that a pidfd refers to; 0 if it has none.
pid_t process_of(int pidfd);

}  // namespace tessera::shm::detail
