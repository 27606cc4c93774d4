#pragma once
// GroupWatch: what one group of this process knows about faults of its members. The group writes
// its position into it and asks it before each call; the manager's watcher thread writes losses
// into it.
//
//   // one atomic load; throws PeerLostError
//   GroupState, starting a call:     watch.require_healthy(operation, sequence);
//                                    watch.begin(sequence, operation);
//   // throws the typed error
//   RequestState, work failed:       watch.fail(call, sequence, std::current_exception(), limit);
//   Group::abort(reason):            watch.announce(reason);
//   Backends that wait in a loop of their own (MPI, threads) poll watch.poison().
//   Backends that block elsewhere (Gloo) are woken by the interrupt hook.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::detail {

/// Why a group cannot go on: the global ranks that are known to be gone (or that aborted, or for
/// which a wait ran out), and a sentence that says how.
struct Poison {
  std::vector<int> ranks;
  std::string reason;
  /// Calls throw TimeoutError instead of PeerLostError.
  bool timed_out = false;
  /// Calls throw MismatchError.
  bool mismatch = false;
  /// A rank failed alone and is alive: calls throw PeerFailedError, and say so here before.
  std::function<void()> told = {};
};

/// Where a rank stands in a group: calls begun so far, and the newest one.
struct Position {
  std::uint64_t begun = 0;
  std::string operation;
};

/// What one rank answered to a roll call.
struct RollEntry {
  /// silent: alive as far as is known, but does not answer (stopped, cut off).
  enum class Answer : unsigned char { unknown, silent, gone, here };
  /// Global.
  int rank = 0;
  Answer answer = Answer::unknown;
  /// Where it stands, if it is here.
  Position position;
};

/// The way to the other ranks that does not go through the group itself. Implementations: the job's
/// store (processes), the hub of run_threads (threads).
class FaultChannel {
 public:
  virtual ~FaultChannel() = default;
  /// Tells the other ranks that this group is aborted. Never throws, never blocks for long.
  virtual void announce(const std::string& group, const std::vector<int>& members,
                        const Poison& poison) noexcept = 0;
  /// Asks the members where they stand in the group; returns when all answered or after `limit`.
  virtual std::vector<RollEntry> roll_call(const std::string& group,
                                           const std::vector<int>& members,
                                           std::chrono::milliseconds limit) noexcept = 0;
};

class GroupWatch {
 public:
  /// As a call number: the making of the group itself. All who have begun that have arrived.
  static constexpr std::uint64_t creation = ~std::uint64_t{0};

  /// `rank` is this process' global rank, `members` the global ranks in group order. Without a
  /// channel, faults stay local.
  GroupWatch(std::string group, std::vector<int> members, int rank,
             std::shared_ptr<FaultChannel> channel);

  const std::string& group() const { return group_; }
  const std::vector<int>& members() const { return members_; }

  /// Null while the group is sound. The object lives as long as the watch.
  const Poison* poison() const { return poison_.load(std::memory_order_acquire); }
  /// Throws PeerLostError if the group is poisoned.
  void require_healthy(const char* operation, std::uint64_t sequence) const;
  /// Records that call number `sequence` (0, 1, ...) begins. `operation` must be a string literal.
  void begin(std::uint64_t sequence, const char* operation) {
    operation_.store(operation, std::memory_order_relaxed);
    begun_.store(sequence + 1, std::memory_order_release);
  }
  Position position() const;

  /// While it lives, nobody hears what this thread's calls throw: they do not count as told.
  class Unheard {
   public:
    Unheard();
    ~Unheard();
    Unheard(const Unheard&) = delete;
    Unheard& operator=(const Unheard&) = delete;
  };

  /// What `interrupt` wakes: calls of the backend, or the making of the group.
  enum class Of : unsigned char { backend, creation };
  /// Called once, from any thread, when the group becomes poisoned: makes this process' pending
  /// calls on the group return. Set before the first call; cleared (empty function) before the
  /// backend is destroyed. Runs at once if the group is poisoned already.
  void set_interrupt(std::function<void()> interrupt, Of of = Of::backend);

  /// Marks the group as unable to go on, in this process only. The first reason stays.
  void set_poison(Poison poison);
  /// spread() with "rank R aborted: reason".
  void announce(const std::string& reason);
  /// Marks it here and tells the members.
  void spread(Poison poison);
  /// Waits until the group is poisoned, for what is on its way from another rank; at most `limit`,
  /// and not at all where no news can come. False: nothing came.
  bool await_news(std::chrono::milliseconds limit) const {
    return poison() || (channel_ && wait_for_poison(limit));
  }
  /// A member has left the job on purpose. What it sent before still counts; a call that needs more
  /// of it fails, and then says so.
  void note_left(int rank, const std::string& text);

  /// Turns the failure of a call into TimeoutError, PeerLostError or CommError, after asking who is
  /// gone or missing; poisons the group on all members. `call` names operation and tensor as errors
  /// show it. `limit` is the limit that the call had. Of a message (send, receive, exchange) it
  /// cannot be known who "arrived": give collective = false. Never returns.
  [[noreturn]] void fail(const std::string& call, std::uint64_t sequence,
                         const std::exception_ptr& cause, std::chrono::milliseconds limit,
                         bool collective = true);
  /// The same for a wait that ran into its limit without the backend saying so.
  [[noreturn]] void expire(const std::string& call, std::uint64_t sequence,
                           std::chrono::milliseconds limit, bool collective = true);

 private:
  [[noreturn]] void throw_poison(const std::string& call, std::uint64_t sequence,
                                 const Poison& poison) const;
  bool wait_for_poison(std::chrono::milliseconds limit) const;

  std::string group_;
  std::vector<int> members_;
  int rank_;
  std::shared_ptr<FaultChannel> channel_;
  std::atomic<std::uint64_t> begun_{0};
  std::atomic<const char*> operation_{""};
  std::atomic<const Poison*> poison_{nullptr};
  mutable std::mutex mutex_;  // guards the three below
  mutable std::condition_variable poisoned_;
  std::unique_ptr<Poison> first_;
  std::vector<int> left_;
  std::string left_text_;
  // guards interrupts_; held while one runs, so that clearing it waits for the end of that
  std::mutex interrupt_mutex_;
  std::array<std::function<void()>, 2> interrupts_;
};

}  // namespace tessera::detail
