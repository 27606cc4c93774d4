#pragma once
// Core: one rank's end of the shared memory: steps, waiting, and calls in progress.
//
// The protocol. All collectives of a group are numbered steps, the same on all ranks, and so are
// those of them that need a slot, since their data are longer than a line. In step t, the s-th with
// a slot, a rank may publish: it writes its slot s mod kSlots, or up to 56 bytes into its line
// t mod kLines, then that line's mark. Other ranks read after they have seen the mark. A rank that
// has finished with step t records that in `done`; a slot or a line is written again when all ranks
// are done with the step that had it before. Every word has one writer at a time, so no two ranks
// contend for it (but `waits_for`, below).
//
// Who writes a slot. A line that one core wrote and another one has read is in both caches, and the
// first of them to write it has to take it from the other. Where that is the core that wrote it
// last, that costs 9 ns a line on an AMD EPYC, 26 between cores without a common cache; where it is
// the one that read it last, no more than in its own memory. Of two ranks each therefore writes
// where it has read: they exchange their slots with every round of them. What only one rank reads,
// as a message, can be left to its core by a store to each line (take()).
//
// Sleeping. A rank that gives up spinning first announces it (waits_for, sleepers), then looks once
// more, then sleeps on its bell. A rank that has published looks for sleepers afterwards; the first
// that finds one takes the announcement back and rings, so that a sleeper costs one system call
// however much is published before it runs again. One of the two must see the other, so both sides
// need a memory barrier between their two halves. On the publishing side it would cost time in
// every call; so the rank that falls asleep makes the kernel execute a barrier on all ranks
// (membarrier), and only where that is not available is a publication an atomic exchange, which
// includes one. tests/shm/model_test.cpp tries all interleavings of both.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/pinned.h"
#include "tessera/shm/detail/layout.h"
#include "tessera/shm/detail/liveness.h"
#include "tessera/shm/detail/segment.h"
#include "tessera/shm/detail/stream.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {

class Core;
class Messages;

/// What a call is waiting for.
struct Need {
  enum class Kind : unsigned char { nothing, line, done };
  Kind kind = Kind::nothing;
  /// The first rank that has not got there.
  int rank = -1;
  /// The step whose line, or whose end, is waited for.
  std::uint64_t step = 0;
};

/// One call in progress: a state machine that is advanced by the thread that waits.
class Op : Pinned {
 public:
  explicit Op(const char* name) : name(name) {}
  virtual ~Op();

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
  /// Steps [first, first + steps) belong to this call. The first `in_lines` of them need no slot,
  /// each of the others has the next one, from number `first_slot` on.
  std::uint64_t first = 0, steps = 0, in_lines = 0, first_slot = 0;
  /// For each slot, the step of an earlier call that had it last.
  std::array<std::uint64_t, kSlots> slot_users{};
  std::uint64_t signature = 0;
  bool collective = true;
  bool complete = false;
  std::exception_ptr error;
  Need need;
  /// For a started call, which no thread may be waiting for.
  Deadline deadline = Deadline::max();
  std::chrono::milliseconds limit{0};
};

/// Who reads what is written to shared memory.
enum class Readers : unsigned char {
  /// The other one of two ranks, which writes there next.
  partner,
  /// One rank; the next write comes from another one.
  one,
  several,
};

/// How data for other ranks are written, but for those of a partner, which the cache always serves
/// best.
struct ChosenStores {
  Stores for_one = Stores::cached;
  bool past_for_several = false;
};

struct CoreOptions {
  std::string name;
  int rank = 0, size = 1;
  Layout layout;
  /// There are fewer cores than ranks: a wait yields its core soon.
  bool crowded = false;
  /// The processes of all ranks take part in membarrier.
  bool remote_barriers = false;
  /// Limit of the messages that this rank keeps because no receive has been posted for them.
  std::size_t kept_bytes = 0;
};

/// Registers this process for remote barriers; returns whether it can take part in them.
bool register_for_barriers();

class Core : Pinned {
 public:
  Core(CoreOptions options, std::shared_ptr<Mapping> memory, Identity identity, Liveness liveness);
  ~Core();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const CoreOptions& options() const { return options_; }
  const Layout& layout() const { return options_.layout; }
  const Liveness& liveness() const { return liveness_; }

  // ---- calls ----
  /// Runs a call to its end. Throws what ended it before.
  void run(Op& op, std::chrono::milliseconds limit);
  /// Begins a call; `op` lives until it is complete.
  void start(Op& op, std::chrono::milliseconds limit);
  /// Advances all calls once; true if `op` is complete. Throws what ended it.
  bool test(Op& op);
  void wait(Op& op, std::chrono::milliseconds limit);
  /// True if a call that has nothing to do may return at once: nothing has ended the group, and
  /// this process is a rank of it. From any thread.
  bool whole() const {
    return !ended_.load(std::memory_order_acquire) && !identity_.forked() &&
           header_.failed.load() == 0;
  }
  /// Ends the calls of all ranks; from any thread. In a forked child this and what follows do
  /// nothing.
  void abort(const std::string& reason);
  /// Ends the calls of this rank.
  void interrupt(const std::string& reason);
  /// The three below: see Group.
  bool drive(std::chrono::nanoseconds nap);
  bool neglected();
  void nudge();

  // ---- the protocol, used by calls; the lock is held ----
  RankState& state(int rank) const { return *reinterpret_cast<RankState*>(region(rank)); }
  std::byte* slot(const Op& op, int rank, std::uint64_t step) const {
    const std::uint64_t number = slot_number(op, step);
    // Of two ranks, each writes next where it has read.
    const auto turn = static_cast<int>(number / kSlots & 1);
    return region(size() == 2 ? rank ^ turn : rank) + layout().slots_at() +
           number % kSlots * layout().slot_bytes();
  }
  Line& line(int rank, std::uint64_t step) const { return state(rank).lines[step % kLines]; }
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

  /// Where the data of a step are.
  enum class Place : unsigned char { slot, line };
  /// True if this rank may write its line of this step, and its slot.
  bool writable(Op& op, std::uint64_t step, Place place);
  /// True if `rank` is done with the step.
  bool is_done(Op& op, int rank, std::uint64_t step);
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
  /// Reads the memory of another rank's process, and of no other. Throws PeerLostError if that
  /// fails, and as require_held().
  void copy_from(int rank, std::byte* to, std::uint64_t address, std::size_t bytes) const;
  /// Throws what the group has ended by if this rank has given its calls up, so that what was read
  /// of its memory may be no data.
  void require_held(int rank) const;
  /// Throws PeerLostError if a rank has left or its process has ended, and what the group has ended
  /// by.
  void require_peers();
  /// Copies to memory that other ranks read next.
  void put(std::byte* to, const std::byte* from, std::size_t bytes, Readers readers) const {
    if (past_cache(readers))
      stream_bytes(to, from, bytes);
    else if (bytes != 0)
      std::memcpy(to, from, bytes);
  }
  /// Copies what was put for Readers::one, from a place whose lines hold nothing else. It is gone
  /// afterwards.
  void take(std::byte* to, std::byte* from, std::size_t bytes) const {
    if (stores_.for_one == Stores::handed_over && bytes >= kStreamBytes)
      take_bytes(to, from, bytes);
    else if (bytes != 0)
      std::memcpy(to, from, bytes);
  }
  /// How slots are read in which every rank writes.
  Readers readers() const { return size() == 2 ? Readers::partner : Readers::several; }
  bool past_cache(Readers readers) const {
    return readers == Readers::one ? stores_.for_one == Stores::past_cache
                                   : readers == Readers::several && stores_.past_for_several;
  }
  const ChosenStores& stores() const { return stores_; }
  void write_by(const ChosenStores& stores) { stores_ = stores; }
  /// True if ranks copy out of each other's memory; the same on all.
  bool single_copy() const { return single_copy_; }
  void allow_single_copy(bool allowed) { single_copy_ = allowed; }

  bool marked(int rank, std::uint64_t step) const;
  bool is_done(int rank, std::uint64_t step) const;
  /// "shm group 'world', rank 2 of 4, all_reduce (call 7)".
  std::string where(const Op& op) const;
  std::string who(int rank) const;

 private:
  friend class Messages;
  static constexpr int kPlaceBits = 41;
  using Lock = std::unique_lock<std::mutex>;

  static std::uint64_t slot_number(const Op& op, std::uint64_t step) {
    return op.first_slot + (step - op.first - op.in_lines);
  }
  /// Throws PeerLostError in a forked child, where another thread of the parent may have held the
  /// lock for ever.
  void require_rank() const;
  Lock lock_as_rank() {
    require_rank();
    return Lock(mutex_);
  }
  void require_usable(const Op& op);
  /// Gives the call its number and its steps.
  void number(Op& op);
  void enqueue(Op& op);
  bool progress();
  void wait_locked(Lock& lock, Op& op, std::chrono::milliseconds limit);
  bool settled(const Op& op) const { return op.complete || op.error; }
  /// Sleeps until `op` can advance; null: any call in progress.
  void sleep(Lock& lock, const Op* op, std::chrono::nanoseconds limit);
  bool under_way() const;
  [[noreturn]] void expire(const Op& op, std::chrono::milliseconds limit);
  /// The calls that other ranks are waited for: those behind the first collective wait for it.
  std::vector<Op*> pending() const;
  /// Throws if the group has failed, or a rank that some call waits for is gone.
  void check_peers();
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
  /// A forked child must not take part in calls.
  const Identity identity_;
  Liveness liveness_;
  std::unique_ptr<Messages> messages_;

  std::mutex mutex_;
  std::deque<Op*> queue_;
  std::exception_ptr broken_;
  /// True once broken_ is set.
  std::atomic<bool> ended_{false};
  bool single_copy_ = false;
  ChosenStores stores_;
  std::uint64_t next_step_ = 0, next_slot_ = 0, next_number_ = 0;
  /// For each slot, the step that has it last.
  std::array<std::uint64_t, kSlots> slot_users_{};
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
