#pragma once
// MPI in this process: who initialised it, its thread level, the communicator that groups are made
// from, and the watchdog of blocking calls.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/backends/mpi/mpi_part.h"

namespace tessera::detail {

/// Checks the return code of an MPI function. Throws CommError with MPI's text if it is not
/// MPI_SUCCESS.
void check_mpi(int code, const char* function);
/// Tests once; true when the request is complete. Throws CommError, naming `function`.
bool mpi_test(MPI_Request& request, const char* function);
/// What MPI_Finalized() and its like say.
bool mpi_flag(int (*query)(int*));

/// One backend's entry in the watchdog's list. `phase` is odd while the backend's thread is inside
/// a blocking MPI call that all ranks have reached.
struct BlockingSlot {
  std::atomic<std::uint64_t> phase{0};
  std::atomic<std::int64_t> limit_ms{0};
  std::atomic<const char*> operation{""};
  /// "rank 3 in group 'world'"
  std::string who;
  /// Used by the watchdog alone: the phase it saw last,
  std::uint64_t seen_phase = 0;
  /// and when it first saw it.
  std::chrono::steady_clock::time_point seen_since;
};

/// Marks a blocking MPI call for the watchdog. Costs two stores; the watchdog reads the clock.
class BlockingPhase : Pinned {
 public:
  BlockingPhase(BlockingSlot& slot, const char* operation, std::int64_t limit_ms) : slot_(slot) {
    slot_.operation.store(operation, std::memory_order_relaxed);
    slot_.limit_ms.store(limit_ms, std::memory_order_relaxed);
    slot_.phase.fetch_add(1, std::memory_order_release);
  }
  ~BlockingPhase() { slot_.phase.fetch_add(1, std::memory_order_release); }

 private:
  BlockingSlot& slot_;
};

/// Ends the job if a backend stays in one blocking phase for longer than its limit: nothing else
/// can end such a wait.
class BlockingWatchdog {
 public:
  explicit BlockingWatchdog(bool may_call_mpi) : may_call_mpi_(may_call_mpi) {}
  ~BlockingWatchdog();
  /// A slot that is watched as long as its holder lives; the thread starts with the first one.
  std::shared_ptr<BlockingSlot> watch(std::string who);

 private:
  void run();

  const bool may_call_mpi_;
  std::mutex mutex_;  // guards the three below
  std::condition_variable wake_;
  std::vector<std::weak_ptr<BlockingSlot>> slots_;
  bool stop_ = false;
  std::thread thread_;
};

class MpiComm;

/// Initialises MPI at most once, and finalises it on destruction if it was initialised here.
class MpiLibrary : Pinned {
 public:
  /// The instance of this process; made on first use.
  static std::shared_ptr<MpiLibrary> open(MpiThreadLevel wanted);
  /// An instance for an MPI that the program has initialised.
  static std::shared_ptr<MpiLibrary> attach();
  ~MpiLibrary();

  /// True if MPI was initialised here.
  bool owner() const { return owner_; }
  MpiThreadLevel level() const { return level_; }
  /// Throws Error if MPI's level forbids calls from this thread.
  void require_thread() const;
  /// Held around MPI calls at level `serialized`; an empty lock at the other levels.
  std::unique_lock<std::mutex> serialize();
  /// Records that some operation will never complete: MPI must not be finalised.
  void set_broken() { broken_.store(true, std::memory_order_release); }
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  BlockingWatchdog& watchdog() { return *watchdog_; }
  /// Sets how long the destructor waits for the other ranks before it gives up: the longest limit
  /// that a group had.
  void set_end_limit(std::chrono::milliseconds limit);
  /// A duplicate of MPI_COMM_WORLD with MPI_ERRORS_RETURN, if MPI was initialised here.
  MPI_Comm world() const { return world_; }
  /// Makes drive() call `step` on this thread until it returns true or has expired.
  void step_in_waits(const std::weak_ptr<const std::function<bool()>>& step);
  /// Makes drive() pump the queue of `comm` until it is removed. remove_queue() waits for a pump in
  /// progress.
  void add_queue(MpiComm* comm);
  void remove_queue(MpiComm* comm);
  /// Counts the calls that stand in queues.
  void count_queued(int change) { queued_.fetch_add(change, std::memory_order_relaxed); }
  /// Continues what this thread has started and does not wait for at present, and the calls in the
  /// queues of all groups.
  void drive() {
    if (queued_.load(std::memory_order_relaxed) > 0) pump_queues();
    if (has_steps_.load(std::memory_order_relaxed)) run_steps();
  }

 private:
  MpiLibrary(bool owner, int provided);

  struct Step {
    std::thread::id thread;
    std::weak_ptr<const std::function<bool()>> run;
  };
  void run_steps();
  void pump_queues();

  const bool owner_;
  const MpiThreadLevel level_;
  std::mutex mutex_;
  std::mutex steps_mutex_;  // guards steps_
  std::vector<Step> steps_;
  std::atomic<bool> has_steps_{false};
  /// Guards queues_; taken before a queue's own.
  std::mutex queues_mutex_;
  std::vector<MpiComm*> queues_;
  std::atomic<int> queued_{0};
  std::atomic<bool> broken_{false};
  std::atomic<std::int64_t> end_limit_ms_{0};
  MPI_Comm world_ = MPI_COMM_NULL;
  std::unique_ptr<BlockingWatchdog> watchdog_;
};

/// A duplicate of the communicator with MPI_ERRORS_RETURN. Collective over it. Throws TimeoutError
/// if not all ranks have come within the limit; MPI must not be finalised then.
MPI_Comm duplicate(MPI_Comm comm, std::chrono::milliseconds limit);
/// Frees a communicator of errors that return. Messages that came and that nobody received, as a
/// meeting that was given up leaves some, are taken in first: MPICH 5 ends the job over them.
/// False if one did not arrive in 10 s, its sender having died: MPI must not be finalised then.
[[nodiscard]] bool free_comm(MPI_Comm& comm) noexcept;
/// True once all ranks of the communicator have come, false after `limit`.
bool all_come(MPI_Comm comm, std::chrono::milliseconds limit);

/// What members have reported to this process, the first rank of their groups, and no try of it to
/// make the group has answered: the next try begins with it, since a member reports once in a try.
class MpiReports {
 public:
  /// The member's last try of the group; it replaces an earlier one.
  void keep(std::uint64_t group, int rank, std::uint64_t its_try) {
    const std::lock_guard lock(mutex_);
    tries_[{group, rank}] = its_try;
  }
  /// What was kept, which is forgotten; 0: nothing.
  std::uint64_t take(std::uint64_t group, int rank) {
    const std::lock_guard lock(mutex_);
    const auto found = tries_.extract({group, rank});
    return found ? found.mapped() : 0;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, int>, std::uint64_t> tries_;
};

class MpiContext final : public MpiRanks {
 public:
  MpiContext(std::shared_ptr<MpiLibrary> library, MPI_Comm comm, bool owns_comm);
  ~MpiContext() override;

  MpiThreadLevel thread_level() const override { return library_->level(); }
  std::string host() const override;
  Launch launch(std::chrono::milliseconds limit) override;
  [[noreturn]] void fatal(const std::string& reason) const override;
  std::shared_ptr<Transport> make_transport(const std::vector<int>& ranks,
                                            const MpiBackendOptions& options,
                                            const MpiAttempt& attempt) override;

  const std::shared_ptr<MpiLibrary>& library() const { return library_; }
  MPI_Comm comm() const { return comm_; }
  /// A number that this process has not given yet, for messages on comm(): 1, 2, ...
  std::uint64_t next_try() { return ++tries_; }
  MpiReports& reports() { return reports_; }

 private:
  const std::shared_ptr<MpiLibrary> library_;
  const MPI_Comm comm_;
  const bool owns_comm_;
  std::atomic<std::uint64_t> tries_{0};
  MpiReports reports_;
};

/// Prints rank, host and reason, then ends the job.
[[noreturn]] void mpi_fatal(const std::string& who, const std::string& reason, bool may_call_mpi);

}  // namespace tessera::detail
