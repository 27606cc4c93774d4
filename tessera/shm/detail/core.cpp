#include "tessera/shm/detail/core.h"
#include "tessera/base/deadline.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "tessera/base/text.h"
#include "tessera/shm/detail/messages.h"

namespace tessera::shm::detail {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// A mark: step + 1, steps that the rank is not done with, signature of the call.
constexpr int kStepBits = 40, kSignatureAt = 48;
constexpr std::uint64_t kStepMask = (std::uint64_t{1} << kStepBits) - 1, kMostLag = 255;
/// Sleeps are divided into intervals of this length, so that a rank that died is noticed soon.
constexpr nanoseconds kNap = milliseconds(100);
/// How long a wait spins on its core: with a core for each rank, and with fewer.
constexpr nanoseconds kSpin = milliseconds(2), kCrowdedSpin = microseconds(50);
constexpr int kLooksPerClock = 64;
/// Number of looks, one right after the other, before a wait pauses the core between them.
constexpr int kQuickLooks = 64;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, nanoseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void ring_bell(Bell& bell) {
  bell.rings.fetch_add(1);
  ::syscall(SYS_futex, &bell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

bool register_for_barriers() {
  return ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0 &&
         ::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

Op::~Op() = default;

std::vector<int> Op::missing(const Core& core) const {
  std::vector<int> ranks;
  if (need.kind == Need::Kind::nothing) return ranks;
  for (int r = 0; r < core.size(); ++r) {
    if (r == core.rank()) continue;
    if (need.kind == Need::Kind::done ? !core.is_done(r, need.step)
                                      : (reads(r) && !core.marked(r, need.step)))
      ranks.push_back(r);
  }
  return ranks;
}

Core::Core(CoreOptions options, std::shared_ptr<Mapping> memory, Identity identity,
           Liveness liveness)
    : options_(std::move(options)),
      memory_(std::move(memory)),
      header_(*reinterpret_cast<Header*>(memory_->data())),
      identity_(std::move(identity)),
      liveness_(std::move(liveness)),
      messages_(std::make_unique<Messages>(*this)),
      seen_done_(static_cast<std::size_t>(options_.size), 0) {}

Core::~Core() {
  if (identity_.forked()) return;
  state(rank()).left.store(1);
  ring_all();
}

// ---- memory in which calls work in place ----

std::uint64_t Core::next_memory() {
  const Lock lock = lock_as_rank();
  std::erase_if(memories_, [](const auto& memory) { return memory.second.expired(); });
  return ++memory_count_;
}

void Core::attach(std::uint64_t number, const std::shared_ptr<Core>& memory) {
  // The descriptors of the ranks' processes are those of this group as well.
  memory->liveness_ = Liveness();
  const std::lock_guard lock(mutex_);
  memories_[number] = memory;
}

std::uint64_t Core::place_of(const std::byte* data, std::size_t bytes) const {
  const auto inside = [&](const Core& core) -> std::uint64_t {
    const auto at = reinterpret_cast<std::uintptr_t>(data) -
                    reinterpret_cast<std::uintptr_t>(core.arena(core.rank()));
    const std::size_t size = core.layout().arena_bytes();
    return at < size && bytes <= size - at ? at + 1 : 0;
  };
  if (const auto at = inside(*this)) return at;
  for (const auto& [number, weak] : memories_) {
    const auto memory = weak.lock();
    if (!memory) continue;
    if (const auto at = inside(*memory)) return (number << kPlaceBits) + at;
  }
  return 0;
}

std::shared_ptr<std::byte> Core::at_place(int rank, std::uint64_t place, std::size_t bytes) const {
  const std::uint64_t number = memory_of(place);
  const std::uint64_t at = (place & ((std::uint64_t{1} << kPlaceBits) - 1)) - 1;
  std::shared_ptr<const Core> other;
  if (number > 0 && number <= memory_count_.load()) {
    const auto known = memories_.find(number);
    if (known != memories_.end()) other = known->second.lock();
    if (!other) return nullptr;
  }
  const Core& core = other ? *other : *this;
  const std::size_t size = core.layout().arena_bytes();
  if (number > memory_count_.load() || at >= size || bytes > size - at)
    throw MismatchError("shm group '", options_.name, "': ", who(rank), " says that ", bytes,
                        " bytes are in memory ", number, " of the group at ", at,
                        ", where they are not");
  return {other, core.arena(rank) + at};
}

std::string Core::where(const Op& op) const {
  return concat("shm group '", options_.name, "', rank ", rank(), " of ", size(), ", ", op.name,
                " (call ", op.number, ")");
}

std::string Core::who(int rank) const {
  const pid_t process = liveness_.process(rank);
  return process > 0 ? concat("rank ", rank, " (process ", process, ")") : concat("rank ", rank);
}

// ---- the protocol ----

bool Core::is_done(int rank, std::uint64_t step) const {
  return state(rank).done.load(std::memory_order_acquire) > step;
}

bool Core::is_done(Op& op, int rank, std::uint64_t step) {
  std::uint64_t& seen = seen_done_[rank];
  if (seen > step) return true;
  const std::uint64_t done = state(rank).done.load(std::memory_order_acquire);
  if (done <= step) {
    op.need = {Need::Kind::done, rank, step};
    return false;
  }
  seen = done;
  return true;
}

bool Core::writable(Op& op, std::uint64_t step, Place place) {
  if (step >= kLines) {
    // All lines are full: waiting until half of them are free takes the word from its writer once
    // for as many steps. The slowest rank never waits here, so the others get there.
    for (int r = 0; r < size(); ++r)
      if (seen_done_[r] + kLines <= step && !is_done(op, r, step - kLines / 2)) return false;
  }
  if (place == Place::line) return true;
  const std::uint64_t number = slot_number(op, step);
  if (number < kSlots) return true;
  const std::uint64_t user =
      number - op.first_slot < kSlots ? op.slot_users[number % kSlots] : step - kSlots;
  for (int r = 0; r < size(); ++r)
    if (!is_done(op, r, user)) return false;
  return true;
}

void Core::publish(const Op& op, std::uint64_t step) {
  // The mark includes what this rank is done with: so the others need not read that word.
  const std::uint64_t lag = std::min<std::uint64_t>(step - seen_done_[rank()], kMostLag);
  write(line(rank(), step).mark,
        ((step + 1) & kStepMask) | (lag << kStepBits) | (op.signature << kSignatureAt));
  ring();
}

bool Core::marked(int rank, std::uint64_t step) const {
  return (line(rank, step).mark.load(std::memory_order_acquire) & kStepMask) ==
         ((step + 1) & kStepMask);
}

bool Core::ready(Op& op, int rank, std::uint64_t step) {
  const std::uint64_t mark = line(rank, step).mark.load(std::memory_order_acquire);
  if ((mark & kStepMask) != ((step + 1) & kStepMask)) {
    op.need = {Need::Kind::line, rank, step};
    return false;
  }
  if (mark >> kSignatureAt != op.signature)
    throw MismatchError(where(op), ": rank ", rank,
                        " calls something else, or the same with other sizes, element type, ",
                        "reduction or root, or did so before; calls must be the same on all ranks");
  const std::uint64_t lag = (mark >> kStepBits) & kMostLag;
  std::uint64_t& seen = seen_done_[rank];
  if (lag < kMostLag && lag <= step) seen = std::max(seen, step - lag);
  return true;
}

void Core::finish(std::uint64_t step) {
  seen_done_[rank()] = step + 1;
  write(state(rank()).done, step + 1);
  ring();
}

void Core::ring() {
  if (header_.sleepers.load() == 0) return;
  const auto me = static_cast<std::uint32_t>(rank()) + 1;
  for (int r = 0; r < size(); ++r) {
    Bell& bell = state(r).bell;
    std::uint32_t waits_for = bell.waits_for.load();
    if (waits_for != Bell::kAnybody && (waits_for != me || r == rank())) continue;
    // Before it rings: afterwards the sleeper may be up, and have announced another sleep. A rank
    // that is stopped in between leaves the sleeper to the end of its nap.
    if (bell.waits_for.compare_exchange_strong(waits_for, Bell::kNobody)) ring_bell(bell);
  }
}

void Core::ring_all() {
  for (int r = 0; r < size(); ++r) ring_bell(state(r).bell);
}

// ---- calls ----

void Core::require_rank() const {
  if (identity_.forked())
    throw PeerLostError(
        concat("shm group '", options_.name, "': this process was forked from rank ", rank(),
               " and is no rank of the group"),
        {rank()});
}

void Core::require_usable(const Op& op) {
  // A call without steps looks at nothing that the other ranks wrote.
  if (!broken_ && op.collective && op.steps == 0 && header_.failed.load() != 0) fail(heard());
  if (broken_) rethrow(op);
}

void Core::number(Op& op) {
  op.number = next_number_++;
  op.first = next_step_;
  next_step_ += op.steps;
  if (op.steps > 0) {
    // All calls before it count: where each rank takes itself for the root, none reads what another
    // has published, and the next call is the first that can differ.
    calls_ = (calls_ ^ op.signature) * 0x9e3779b97f4a7c15ULL;
    op.signature = calls_ >> kSignatureAt;
  }
  if (op.in_lines >= op.steps) return;
  op.first_slot = next_slot_;
  op.slot_users = slot_users_;
  next_slot_ += op.steps - op.in_lines;
  const std::uint64_t last = op.first + op.steps;
  for (std::uint64_t back = std::min(kSlots, op.steps - op.in_lines); back > 0; --back)
    slot_users_[(next_slot_ - back) % kSlots] = last - back;
}

void Core::enqueue(Op& op) {
  if (op.collective) {
    number(op);
    queue_.push_back(&op);
  } else {
    op.number = next_number_++;
    messages_->post(static_cast<Batch&>(op));
  }
}

void Core::run(Op& op, milliseconds limit) {
  Lock lock = lock_as_rank();
  require_usable(op);
  // Where nothing else is under way most calls end at once, and need no queue.
  const bool alone = op.collective && queue_.empty() && !messages_->waiting();
  if (alone)
    number(op);
  else
    enqueue(op);
  try {
    for (int look = options_.crowded ? 1 : kQuickLooks; look > 0 && !op.complete; --look)
      if (alone)
        op.complete = op.advance(*this);
      else
        progress();
  } catch (...) {
    fail(std::current_exception());
    std::rethrow_exception(broken_);
  }
  if (op.complete) return;
  if (alone) queue_.push_back(&op);
  wait_locked(lock, op, limit);
}

void Core::start(Op& op, milliseconds limit) {
  const Lock lock = lock_as_rank();
  require_usable(op);
  op.limit = limit;
  op.deadline = deadline_after(limit);
  enqueue(op);
  try {
    progress();
  } catch (...) {
    fail(std::current_exception());
  }
}

bool Core::test(Op& op) {
  const Lock lock = lock_as_rank();
  if (op.complete) return true;
  if (!op.error) {
    require_usable(op);
    try {
      progress();
      if (!settled(op)) {
        liveness_.look();
        check_peers();
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }
  if (op.error) std::rethrow_exception(op.error);
  return op.complete;
}

void Core::wait(Op& op, milliseconds limit) {
  Lock lock = lock_as_rank();
  if (op.error) std::rethrow_exception(op.error);
  if (!op.complete) wait_locked(lock, op, limit);
}

void Core::wait_locked(Lock& lock, Op& op, milliseconds limit) {
  ++waiting_here_;
  try {
    for (int i = 0; i < kLooksPerClock; ++i) {
      progress();
      if (settled(op)) break;
      if (options_.crowded) break;
      pause_core();
    }
    if (!settled(op)) {
      const Deadline deadline = deadline_after(limit);
      const auto begin = std::chrono::steady_clock::now();
      const nanoseconds keep = options_.crowded ? kCrowdedSpin : kSpin;
      while (!settled(op)) {
        const auto spent = std::chrono::steady_clock::now() - begin;
        if (header_.failed.load() != 0) check_peers();
        if (spent < keep) {
          // Other threads may have work for this core, among them the rank that is waited for.
          lock.unlock();
          if (options_.crowded || spent > microseconds(20)) ::sched_yield();
          lock.lock();
          for (int i = 0; i < (options_.crowded ? 1 : kLooksPerClock) && !settled(op); ++i) {
            progress();
            pause_core();
          }
          continue;
        }
        sleep(lock, &op, std::min<nanoseconds>(time_left(deadline), kNap));
        if (settled(op)) break;
        if (liveness_.look() || time_left(deadline).count() == 0) progress();
        if (settled(op)) break;
        check_peers();
        if (!settled(op) && time_left(deadline).count() == 0) expire(op, limit);
      }
    }
  } catch (...) {
    fail(std::current_exception());
  }
  --waiting_here_;
  if (op.error) std::rethrow_exception(op.error);
}

bool Core::under_way() const { return !broken_ && (!queue_.empty() || messages_->waiting()); }

bool Core::neglected() {
  if (identity_.forked()) return false;
  const Lock lock(mutex_);
  return under_way() && waiting_here_ == 0;
}

void Core::nudge() {
  if (!identity_.forked()) ring_bell(state(rank()).bell);
}

bool Core::drive(nanoseconds nap) {
  if (identity_.forked()) return false;
  Lock lock(mutex_);
  if (!under_way()) return false;
  try {
    if (!progress()) {
      sleep(lock, nullptr, nap);
      liveness_.look();
      check_peers();
      for (const Op* op : pending())
        if (time_left(op->deadline).count() == 0) expire(*op, op->limit);
    }
  } catch (...) {
    fail(std::current_exception());
  }
  return under_way();
}

bool Core::progress() {
  bool moved = messages_->advance();
  while (!queue_.empty() && queue_.front()->advance(*this)) {
    queue_.front()->complete = true;
    queue_.pop_front();
    moved = true;
  }
  for (std::size_t i = 1; i < queue_.size(); ++i) queue_[i]->early(*this);
  if (moved && sleeping_here_ > 0) ring_bell(state(rank()).bell);
  return moved;
}

void Core::sleep(Lock& lock, const Op* op, nanoseconds limit) {
  Bell& bell = state(rank()).bell;
  const bool alone = op != nullptr && sleeping_here_ == 0 && queue_.size() == 1 &&
                     queue_.front() == op && !messages_->waiting() && op->need.rank != rank();
  const int rank_needed = op != nullptr ? op->need.rank : -1;
  const std::uint32_t waits_for =
      alone && rank_needed >= 0 ? static_cast<std::uint32_t>(rank_needed) + 1 : Bell::kAnybody;
  const std::uint32_t rings = bell.rings.load();
  ++sleeping_here_;
  bell.waits_for.store(waits_for);
  header_.sleepers.fetch_add(1);
  if (options_.remote_barriers) ::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
  // What was published before the line above is seen now; what is published after it rings.
  const auto wake_up = [&] {
    --sleeping_here_;
    if (sleeping_here_ == 0) bell.waits_for.store(Bell::kNobody);
    header_.sleepers.fetch_sub(1);
  };
  bool stay = false;
  try {
    stay = !progress() && header_.failed.load() == 0 &&
           (waits_for == Bell::kAnybody || op->need.rank == rank_needed);
  } catch (...) {
    wake_up();
    throw;
  }
  if (stay && (op != nullptr ? !settled(*op) : under_way())) {
    lock.unlock();
    futex_wait(bell.rings, rings, limit);
    lock.lock();
  }
  wake_up();
}

}  // namespace tessera::shm::detail
