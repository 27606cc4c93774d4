#pragma once
// Which ranks' processes are still there. A pidfd tells of the process itself: children that it
// forked and that hold its descriptors do not matter, nor does a number that the system gave to
// another.

#include <sys/types.h>
#include <unistd.h>

#include <vector>

#include "tessera/shm/detail/segment.h"

namespace tessera::shm::detail {

class Liveness {
 public:
  Liveness() = default;
  /// One pidfd a rank; an empty one for ranks of this process.
  explicit Liveness(std::vector<Descriptor> processes);

  /// True once the rank's process has ended. Never true again false.
  bool gone(int rank) const { return !gone_.empty() && gone_[static_cast<std::size_t>(rank)]; }
  /// Asks the kernel about all; true if any has ended since.
  bool look();
  /// The process' number as this process sees it; 0 where it does not, this process' own where the
  /// rank is one of its threads.
  pid_t process(int rank) const {
    return numbers_.empty() ? own_ : numbers_[static_cast<std::size_t>(rank)];
  }
  /// Whether the rank is a thread of this process, or this rank itself.
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

/// The number of the process that a pidfd refers to, in this process' namespace; 0 where it has
/// none.
pid_t process_of(int pidfd);

}  // namespace tessera::shm::detail
