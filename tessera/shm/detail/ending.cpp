// How a group ends: what a rank notices, what it tells the others, and what it hears from them.

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/text.h"
#include "tessera/shm/detail/core.h"
#include "tessera/shm/detail/messages.h"

namespace tessera::shm::detail {

using std::chrono::milliseconds;

namespace {
/// How long a rank that gives up waits for threads that are copying its memory.
constexpr milliseconds kLongestCopy = milliseconds(10000);
}  // namespace

// ---- what a rank notices ----

void Core::expire(const Op& op, milliseconds limit) {
  // A collective waits for those before it, and with them for other ranks.
  const bool behind = op.collective && !queue_.empty() && queue_.front() != &op;
  const Op& first = behind ? *queue_.front() : op;
  const auto missing = first.missing(*this);
  const std::string states =
      joined(missing, ", ", [&](int r) { return concat(who(r), " ", liveness_.state(r)); });
  throw TimeoutError(
      concat(where(op), ": not complete within its timeout of ", limit.count(), " ms; ",
             behind ? concat("with ", first.name, " (call ", first.number, ") before it ") : "",
             "waited for ranks ", list(missing), ": ", states),
      missing);
}

std::vector<Op*> Core::pending() const {
  std::vector<Op*> ops(messages_->batches().begin(), messages_->batches().end());
  if (!queue_.empty()) ops.push_back(queue_.front());
  return ops;
}

void Core::check_peers() {
  for (Op* op : pending())
    if (!settled(*op)) check_peers(*op);
}

void Core::check_peers(Op& op) {
  if (header_.failed.load() != 0) {
    progress();
    if (!settled(op)) std::rethrow_exception(heard());
    return;
  }
  // A rank that is done with a step has published everything that it had in it.
  if (op.need.kind == Need::Kind::line && op.need.rank != rank() &&
      state(op.need.rank).done.load(std::memory_order_acquire) > op.need.step &&
      !marked(op.need.rank, op.need.step))
    throw MismatchError(where(op), ": rank ", op.need.rank,
                        " has made this call without what this rank waits for; calls must ",
                        "be the same on all ranks");
  for (const int r : op.missing(*this)) {
    const bool left = state(r).left.load() != 0;
    if (!left && !liveness_.gone(r)) continue;
    progress();  // It may have published its data before it ended.
    if (settled(op)) return;
    const auto still = op.missing(*this);
    if (std::ranges::find(still, r) == still.end()) continue;
    throw PeerLostError(concat(where(op), ": ", who(r), left ? " has left the group" : " died"),
                        {r});
  }
}

void Core::copy_from(int rank, std::byte* to, std::uint64_t address, std::size_t bytes) const {
  RankState& owner = state(rank);
  bool copied = false;
  int error = 0;
  if (liveness_.own(rank)) {
    // A thread that lets go waits for those that it can see here; they see that it has, if not.
    owner.readers.fetch_add(1);
    if (owner.let_go.load() == 0) copied = liveness_.read(rank, to, address, bytes);
    owner.readers.fetch_sub(1);
  } else {
    copied = liveness_.read(rank, to, address, bytes);
    error = errno;
  }
  require_held(rank);
  if (copied) return;
  std::string why = std::strerror(error);
  if (error == ESRCH) why = "it died";
  if (error == EPERM)
    why =
        "it forbids that since it has given up its user or capabilities, or the right to be looked "
        "at (prctl): do so before the group is made, or make it without single_copy (Options)";
  throw PeerLostError(concat("shm group '", options_.name, "': copying ", bytes,
                             " bytes out of the memory of ", who(rank), ": ", why),
                      {rank});
}

void Core::require_held(int rank) const {
  if (state(rank).let_go.load() == 0) return;
  if (header_.failed.load() != 0) std::rethrow_exception(heard());
  throw PeerLostError(concat("shm group '", options_.name, "': ", who(rank),
                             " gave its calls up before all ranks had its data"),
                      {rank});
}

void Core::require_peers() {
  const Lock lock = lock_as_rank();
  if (broken_) std::rethrow_exception(broken_);
  if (header_.failed.load() != 0) std::rethrow_exception(heard());
  liveness_.look();
  for (int r = 0; r < size(); ++r) {
    const bool left = state(r).left.load() != 0;
    if (left || liveness_.gone(r))
      throw PeerLostError(concat("shm group '", options_.name, "': ", who(r),
                                 left ? " has left the group" : " died"),
                          {r});
  }
}

// ---- what it tells the others, and hears ----

void Core::rethrow(const Op& op) {
  try {
    std::rethrow_exception(op.error ? op.error : broken_);
  } catch (const TimeoutError& error) {
    throw TimeoutError(concat(where(op), ": the group ended: ", error.what()), error.missing(),
                       error.heard());
  } catch (const PeerLostError& error) {
    throw PeerLostError(concat(where(op), ": the group ended: ", error.what()), error.ranks());
  } catch (const MismatchError& error) {
    throw MismatchError(where(op), ": the group ended: ", error.what());
  }
}

std::exception_ptr Core::heard() const {
  const std::uint32_t speaker = header_.failed.load() - 1;
  if (speaker >= static_cast<std::uint32_t>(size()))
    return std::make_exception_ptr(
        PeerLostError(concat("shm group '", options_.name, "': the shared memory is damaged"), {}));
  const LastWords& words = state(static_cast<int>(speaker)).last_words;
  const std::uint32_t kind = words.kind.load();
  const std::string text(words.text, std::min<std::size_t>(words.length, LastWords::kText));
  const int culprit =
      static_cast<int>(std::min(words.culprit, static_cast<std::uint32_t>(size() - 1)));
  const std::string what =
      concat("shm group '", options_.name, "': rank ", speaker, " gave up: ", text);
  if (kind == 3) return std::make_exception_ptr(TimeoutError(what, {culprit}, true));
  if (kind == 4) return std::make_exception_ptr(MismatchError(what));
  return std::make_exception_ptr(
      PeerLostError(what, {kind == 2 ? culprit : static_cast<int>(speaker)}));
}

void Core::say_last_words(std::uint32_t kind, int culprit, const std::string& text) {
  LastWords& words = state(rank()).last_words;
  std::uint32_t silent = 0;
  // 5: being written; two threads may abort at the same time.
  if (!words.kind.compare_exchange_strong(silent, 5)) return;
  words.culprit = static_cast<std::uint32_t>(std::max(culprit, 0));
  words.length = static_cast<std::uint32_t>(std::min(text.size(), LastWords::kText));
  std::memcpy(words.text, text.data(), words.length);
  words.kind.store(kind);
  std::uint32_t nobody = 0;
  header_.failed.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank()) + 1);
  ring_all();
}

void Core::fail(std::exception_ptr error) {
  if (!broken_) {
    broken_ = error;
    ended_.store(true);
    try {
      std::rethrow_exception(error);
    } catch (const TimeoutError& e) {
      say_last_words(3, e.missing().empty() ? rank() : e.missing().front(), e.what());
    } catch (const PeerLostError& e) {
      say_last_words(2, e.ranks().empty() ? rank() : e.ranks().front(), e.what());
    } catch (const MismatchError& e) {
      say_last_words(4, rank(), e.what());
    } catch (const std::exception& e) {
      broken_ = std::make_exception_ptr(PeerLostError(
          concat("shm group '", options_.name, "', rank ", rank(), ": ", e.what()), {rank()}));
      say_last_words(1, rank(), e.what());
    }
    let_go();
  }
  end_all();
}

void Core::end_all() {
  for (Op* op : queue_)
    if (!op->error) op->error = broken_;
  queue_.clear();
  messages_->fail(broken_);
}

void Core::interrupt(const std::string& reason) {
  if (identity_.forked()) return;
  {
    const Lock lock(mutex_);
    // Calls to which all ranks have contributed still complete.
    try {
      if (!broken_) progress();
    } catch (...) {
      fail(std::current_exception());
    }
    if (under_way()) let_go();
    if (!broken_)
      broken_ = std::make_exception_ptr(
          PeerLostError(concat("shm group '", options_.name, "': ", reason), {}));
    ended_.store(true);
    end_all();
  }
  nudge();
}

void Core::abort(const std::string& reason) {
  if (identity_.forked()) return;
  say_last_words(1, rank(), reason.empty() ? "it was told to abort" : reason);
}

void Core::let_go() {
  RankState& own = state(rank());
  own.let_go.store(1);
  // Bounded, since any process of the job could have written there.
  const Deadline deadline = deadline_after(kLongestCopy);
  while (own.readers.load() != 0 && time_left(deadline).count() > 0) ::sched_yield();
}

}  // namespace tessera::shm::detail
