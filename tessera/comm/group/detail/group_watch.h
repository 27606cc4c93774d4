#pragma once
// GroupWatch: what one group of this process knows about faults of its members. The group records
// its position in it and asks it before each call; the manager's watcher thread records lost ranks
// in it.
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
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera::detail {

/// Why a group cannot continue: the global ranks that are known to be gone (or that aborted, or for
/// which a wait ran out), and a sentence that explains it.
struct Poison {
  std::vector<int> ranks;
  std::string reason;
  /// Calls throw TimeoutError instead of PeerLostError.
  bool timed_out = false;
  /// Calls throw MismatchError.
  bool mismatch = false;
  /// A rank failed alone and is alive: calls throw PeerFailedError, and call this function first.
  std::function<void()> on_throw = {};
};

/// How far a rank is in a group: the number of calls begun, and the newest one.
struct Position {
  std::uint64_t begun = 0;
  std::string operation;
};

/// The answer of one rank to a roll call.
struct RollEntry {
  /// silent: alive as far as is known, but not answering (stopped, or its network is cut).
  enum class Answer : unsigned char { unknown, silent, gone, here };
  /// Global.
  int rank = 0;
  Answer answer = Answer::unknown;
  /// How far the rank is, if it answered.
  Position position;
};

/// A way to reach the other ranks that does not go through the group itself. Implemented by the
/// job's store (processes) and by the hub of run_threads (threads).
class FaultChannel {
 public:
  virtual ~FaultChannel() = default;
  /// Tells the other ranks that this group is aborted. Never throws, never blocks for long.
  virtual void announce(const std::string& group, const std::vector<int>& members,
                        const Poison& poison) noexcept = 0;
  /// Asks the members how far they are in the group; returns when all have answered or after
  /// `limit`.
  virtual std::vector<RollEntry> roll_call(const std::string& group,
                                           const std::vector<int>& members,
                                           std::chrono::milliseconds limit) noexcept = 0;

  /// What threads of the channel call. `poisoned` (group, poison): another rank has given up a
  /// group; "": every one. `lost` (rank, on purpose, text): a rank has ended; rank 0 also when the
  /// store is gone. `position`: how far this rank is in a group.
  struct Listener {
    std::function<void(const std::string& group, const Poison& poison)> poisoned;
    std::function<void(int rank, bool on_purpose, const std::string& text)> lost;
    std::function<std::optional<Position>(const std::string& group)> position;
  };
  /// Sets the listener. News that came before is delivered at once. An empty listener ends it: no
  /// call of the old one is running when this returns.
  virtual void listen(Listener) {}
};

class GroupWatch {
 public:
  /// A call number that stands for the making of the group itself: every rank that has begun it has
  /// arrived.
  static constexpr std::uint64_t creation = ~std::uint64_t{0};

  /// `rank` is this process' global rank, `members` the global ranks in group order. Without a
  /// channel, faults stay local.
  GroupWatch(std::string group, std::vector<int> members, int rank,
             std::shared_ptr<FaultChannel> channel);

  const std::string& group() const { return group_; }
  const std::vector<int>& members() const { return members_; }

  /// Why the group is poisoned, or null while it is sound. The object lives as long as the watch.
  const Poison* poison() const { return poison_.load(std::memory_order_acquire); }
  /// Throws PeerLostError if the group is poisoned.
  void require_healthy(const char* operation, std::uint64_t sequence) const;
  /// Records that call number `sequence` (0, 1, ...) begins. `operation` must be a string literal.
  void begin(std::uint64_t sequence, const char* operation) {
    operation_.store(operation, std::memory_order_relaxed);
    begun_.store(sequence + 1, std::memory_order_release);
  }
  Position position() const;

  /// While an object of this class lives, errors that this thread's calls throw do not count as
  /// reported to the user (Poison::on_throw is not called).
  class Unreported : Pinned {
   public:
    Unreported();
    ~Unreported();
  };

  /// What an interrupt wakes: calls of the backend, or the making of the group.
  enum class Of : unsigned char { backend, creation };
  /// Sets the function that makes this process' pending calls on the group return. It is called
  /// once, from any thread, when the group becomes poisoned, or at once if it is already. Set it
  /// before the first call, and clear it (empty function) before the backend is destroyed.
  void set_interrupt(std::function<void()> interrupt, Of of = Of::backend);

  /// Poisons the group in this process only. The first reason stays.
  void set_poison(Poison poison);
  /// Poisons the group on all members with "rank R aborted: reason".
  void announce(const std::string& reason);
  /// Poisons the group here and tells the other members.
  void spread(Poison poison);
  /// Waits at most `limit` until the group is poisoned by news on the way from another rank;
  /// returns at once where no news can come. Returns false if nothing came.
  bool await_news(std::chrono::milliseconds limit) const {
    return poison() || (channel_ && wait_for_poison(limit));
  }
  /// Records that a member has left the job on purpose. What it sent before still counts; a call
  /// that needs more from it fails with `text`.
  void note_left(int rank, const std::string& text);

  /// Turns the failure of a call into TimeoutError, PeerLostError or CommError after asking which
  /// ranks are gone or missing, and poisons the group on all members. `call` names the operation
  /// and the tensor as errors show them; `limit` is the time limit that the call had. Give
  /// collective = false for a message (send, receive, exchange), for which it cannot be known who
  /// arrived. Never returns.
  [[noreturn]] void fail(const std::string& call, std::uint64_t sequence,
                         const std::exception_ptr& cause, std::chrono::milliseconds limit,
                         bool collective = true);
  /// As fail(), for a wait that ran into its time limit without an error of the backend.
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
