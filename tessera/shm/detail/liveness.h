#pragma once
// The ranks' processes: which are still running, and reading their memory. A pidfd refers to the
// process itself: neither children that it forked and that hold its descriptors matter, nor a
// process number that the system has reused. Reading another process' memory takes a number; a
// random one in the memory of each rank shows whose it is.

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/shm/detail/segment.h"

namespace tessera::shm::detail {

/// A number in a rank's memory: its address there, and its value.
struct Probe {
  std::uint64_t address = 0, value = 0;
};

/// This process as a rank: a page that a forked child has as zeros, and a new program not at all.
class Identity {
 public:
  /// `value` is not 0, and random where others read it. Throws SetupError (no_memory).
  explicit Identity(std::uint64_t value);
  Identity(Identity&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  ~Identity();
  /// True in a child that was forked afterwards, which is no rank.
  bool forked() const { return *page_ == 0; }
  Probe probe() const { return {reinterpret_cast<std::uint64_t>(page_), *page_}; }

 private:
  std::uint64_t* page_ = nullptr;
};

class Liveness {
 public:
  Liveness() = default;
  /// One of each per rank.
  Liveness(std::vector<Descriptor> pidfds, std::vector<Probe> probes);

  /// True once the rank's process has ended; it stays true.
  bool gone(int rank) const { return !gone_.empty() && gone_[rank]; }
  /// Asks the kernel about all ranks; true if any has ended since the last time.
  bool look();
  /// The process number as this process sees it; 0 if it does not see it, this process' own if the
  /// rank is one of its threads.
  pid_t process(int rank) const { return numbers_.empty() ? own_ : numbers_[rank]; }
  /// True if the rank is a thread of this process, or this rank itself.
  bool own(int rank) const { return processes_.empty() || numbers_[rank] == own_; }
  /// Copies out of the rank's memory; returns false and sets errno if that fails: ESRCH if its
  /// process is not there any more.
  bool read(int rank, std::byte* to, std::uint64_t address, std::size_t bytes) const noexcept;
  /// "is alive", "is stopped", "has ended".
  const char* state(int rank) const;

 private:
  std::vector<Descriptor> processes_;
  std::vector<Probe> probes_;
  std::vector<bool> gone_;
  std::vector<pid_t> numbers_;
  pid_t own_ = ::getpid();
};

}  // namespace tessera::shm::detail
