#pragma once
// Core: one rank's end of the shared memory: steps, waiting, and calls in progress.
//
// The protocol. All collectives of a group are numbered steps, the same on all ranks. In step t a
// rank may publish: it writes its slot t mod kSlots, then its line's mark. Other ranks read after
// they have seen the mark. A rank that has finished with step t records that in `done`; a slot is
// written again when all ranks are done with what it held. Every word has one writer, so no two
// ranks contend for it.
//
// Sleeping. A rank that gives up spinning first announces it (waits_for, sleepers), then looks once
// more, then sleeps on its bell. A rank that has published looks for sleepers afterwards. One of
// the two must see the other, so both sides need a memory barrier between their two halves. On the
// publishing side it would cost time in every call; so the rank that falls asleep makes the kernel
// execute a barrier on all ranks (membarrier), and only where that is not available is a
// publication an atomic exchange, which includes one. tests/shm/model_test.cpp tries all
// interleavings of both.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/shm/detail/layout.h"
#include "tessera/shm/detail/liveness.h"
#include "tessera/shm/detail/segment.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {

class Core;
class Messages;

/// What a call is waiting for.
struct Need {
  enum class Kind : unsigned char { nothing, line, done, message };
  Kind kind = Kind::nothing;
  /// The first rank that has not got there.
  int rank = -1;
  std::uint64_t step = 0;
};

/// One call in progress: a state machine that is advanced by the thread that waits.
class Op {
 public:
  explicit Op(const char* name) : name(name) {}
  virtual ~Op();
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  /// Advances as far as possible without waiting; true once complete.
  virtual bool advance(Core& core) = 0;
  /// Does what can be done before earlier calls are complete: only publishing.
  virtual void early(Core&) {}
  /// True if this rank waits for lines of `rank`.
  virtual bool reads(int) const { return true; }
  /// The ranks that the call waits for, for errors.
  virtual std::vector<int> missing(const Core& core) const;

  const char* name;
  std::uint64_t number = 0;
  /// Steps [first, first + steps) belong to this call.
  std::uint64_t first = 0, steps = 0;
  std::uint64_t signature = 0;
  bool collective = true;
  bool complete = false;
  std::exception_ptr error;
  Need need;
  /// For a started call, which no thread may be waiting for.
  Deadline deadline = Deadline::max();
  std::chrono::milliseconds limit{0};
};

struct CoreOptions {
  std::string name;
  int rank = 0, size = 1;
  Layout layout;
  /// There are fewer cores than ranks: a wait yields its core soon.
  bool crowded = false;
  /// The processes of all ranks take part in membarrier.
  bool remote_barriers = false;
};

/// Registers this process for remote barriers; returns whether it can take part in them.
bool register_for_barriers();

class Core {
 public:
  Core(CoreOptions options, std::shared_ptr<Mapping> memory, Liveness liveness);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const CoreOptions& options() const { return options_; }
  const Layout& layout() const { return options_.layout; }
  const Liveness& liveness() const { return liveness_; }
  Messages& messages() { return *messages_; }

  // ---- calls ----
  /// Runs a call to its end. Throws what ended it before.
  void run(Op& op, std::chrono::milliseconds limit);
  /// Begins a call; `op` lives until it is complete.
  void start(Op& op, std::chrono::milliseconds limit);
  /// Advances all calls once; true if `op` is complete. Throws what ended it.
  bool test(Op& op);
  void wait(Op& op, std::chrono::milliseconds limit);
  /// Ends the calls of all ranks; from any thread.
  void abort(const std::string& reason);
  /// Ends the calls of this rank.
  void interrupt(const std::string& reason);
  /// The three below: see Group.
  bool drive(std::chrono::nanoseconds nap);
  bool neglected();
  void nudge();

  // ---- the protocol, used by calls; the lock is held ----
  RankState& state(int rank) const { return *reinterpret_cast<RankState*>(region(rank)); }
  std::byte* slot(int rank, std::uint64_t step) const {
    return region(rank) + layout().slots_at() + (step % kSlots) * layout().slot_bytes();
  }
  Line& line(int rank, std::uint64_t step) const { return state(rank).lines[step % kSlots]; }
  std::byte* region(int rank) const { return memory_->data() + layout().region(rank); }
  std::byte* arena(int rank) const { return region(rank) + layout().arena_at(); }

  // ---- memory in which calls work in place: number 0 is the arena of this group itself, number n
  // that of the n-th Group::share(), the same on all ranks ----
  /// The number of the next one, whether or not it comes about.
  std::uint64_t next_memory();
  /// `memory` is used for as long as something else keeps it alive. It makes no calls.
  void attach(std::uint64_t number, const std::shared_ptr<Core>& memory);
  /// True if there is or was any, which all ranks answer alike.
  bool shares() const { return layout().arena_bytes() > 0 || memory_count_.load() > 0; }
  /// Where these bytes of this rank are, as at_place() finds them; 0 if they are not in memory that
  /// all ranks reach.
  std::uint64_t place_of(const std::byte* data, std::size_t bytes) const;
  /// What `rank` said that place_of() gave it, in this process' memory; null if this process has
  /// let that memory go. Throws MismatchError if it cannot be true.
  std::shared_ptr<std::byte> at_place(int rank, std::uint64_t place, std::size_t bytes) const;
  /// The number of the memory of a place other than 0.
  static std::uint64_t memory_of(std::uint64_t place) { return place >> kPlaceBits; }

  // ---- slots, lines, channels ----
  Channel& channel(int from, int to) const {
    return reinterpret_cast<Channel*>(region(from) + layout().channels_at())[to];
  }
  std::byte* frame_data(int from, int to, std::uint64_t frame) const {
    return region(from) + layout().frames_at() +
           (static_cast<std::size_t>(to) * kFrames + frame % kFrames) * layout().frame_bytes();
  }

  /// True if this rank may write its slot of this step.
  bool writable(Op& op, std::uint64_t step);
  /// Makes this rank's line of the step visible to all ranks.
  void publish(const Op& op, std::uint64_t step);
  /// True if `rank` has published the step. Throws MismatchError if it called something else.
  bool ready(Op& op, int rank, std::uint64_t step);
  /// Records that this rank is done with all steps up to this one.
  void finish(std::uint64_t step);
  /// Writes a word that other ranks may wait for.
  template <class T>
  void write(std::atomic<T>& word, T value) const {
    if (options_.remote_barriers) {
      word.store(value, std::memory_order_release);
      // This orders the compiler; the CPU is ordered by the rank that falls asleep.
      std::atomic_signal_fence(std::memory_order_seq_cst);
    } else {
      word.exchange(value);
    }
  }
  /// Wakes ranks that sleep until this rank has done something. Call it after write().
  void ring();
  /// Reads the memory of another rank's process. Throws PeerLostError if that fails, and as
  /// require_held().
  void copy_from(int rank, std::byte* to, std::uint64_t address, std::size_t bytes) const;
  /// Throws what the group has ended by if this rank has given its calls up, so that what was read
  /// of its memory may be no data.
  void require_held(int rank) const;
  /// Throws PeerLostError if a rank has left or its process has ended, and what the group has ended
  /// by.
  void require_peers();
  /// Copies as copy_from(); returns false and sets errno if that fails.
  bool try_copy_from(int rank, std::byte* to, std::uint64_t address,
                     std::size_t bytes) const noexcept;
  /// True if ranks copy out of each other's memory; the same on all.
  bool single_copy() const { return single_copy_; }
  void allow_single_copy(bool allowed) { single_copy_ = allowed; }

  bool marked(int rank, std::uint64_t step) const;
  bool freed(int rank, std::uint64_t step) const;
  /// "shm group 'world', rank 2 of 4, all_reduce (call 7)".
  std::string where(const Op& op) const;
  std::string who(int rank) const;

 private:
  friend class Messages;
  static constexpr int kPlaceBits = 41;
  using Lock = std::unique_lock<std::mutex>;

  void require_usable(const Op& op);
  void enqueue(Op& op);
  bool progress();
  void wait_locked(Lock& lock, Op& op, std::chrono::milliseconds limit);
  bool settled(const Op& op) const { return op.complete || op.error; }
  /// Sleeps until `op` can advance; null: any call in progress.
  void sleep(Lock& lock, const Op* op, std::chrono::nanoseconds limit);
  bool under_way() const;
  [[noreturn]] void expire(const Op& op, std::chrono::milliseconds limit);
  /// Throws if the group has failed, or a rank that `op` waits for is gone.
  void check_peers(Op& op);
  void rethrow(const Op& op);
  /// Ends all calls of this rank with this error, and tells the other ranks.
  void fail(std::exception_ptr error);
  void end_all();
  /// Called before the memory of calls under way is given back.
  void let_go();
  void say_last_words(std::uint32_t kind, int culprit, const std::string& text);
  std::exception_ptr heard() const;
  void ring_all();

  const CoreOptions options_;
  const std::shared_ptr<Mapping> memory_;
  Header& header_;
  Liveness liveness_;
  std::unique_ptr<Messages> messages_;
  /// A byte that the kernel sets to 0 in a forked child, which must not take part in calls.
  std::byte* const unforked_;

  std::mutex mutex_;
  std::deque<Op*> queue_;
  std::exception_ptr broken_;
  bool single_copy_ = false;
  std::uint64_t next_step_ = 0, next_number_ = 0;
  /// A hash of all collectives so far, the same on all ranks.
  std::uint64_t calls_ = 0;
  std::atomic<std::uint64_t> memory_count_{0};
  /// By number: those that may still be alive.
  std::map<std::uint64_t, std::weak_ptr<Core>> memories_;
  /// For each rank: it is done with the steps below this number, as far as is known here.
  std::vector<std::uint64_t> seen_done_;
  int sleeping_here_ = 0, waiting_here_ = 0;
};

}  // namespace tessera::shm::detail
