#include "tessera/comm/group/detail/group_watch.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {
namespace {

std::string numbered(const std::string& call, std::uint64_t sequence) {
  return sequence == GroupWatch::creation ? call : concat(call, " (call ", sequence, ")");
}

// A broken connection is noticed milliseconds before the news which rank broke it.
constexpr std::chrono::milliseconds kNews{1000};
// Ranks that are alive answer within milliseconds; the others cost this much once.
constexpr std::chrono::milliseconds kRollCall{500};

std::string text_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

bool says(const std::string& text, std::initializer_list<const char*> parts) {
  return std::ranges::any_of(
      parts, [&](const char* part) { return text.find(part) != std::string::npos; });
}

int& unreported() {
  static thread_local int depth = 0;
  return depth;
}

}  // namespace

GroupWatch::Unreported::Unreported() { ++unreported(); }
GroupWatch::Unreported::~Unreported() { --unreported(); }

GroupWatch::GroupWatch(std::string group, std::vector<int> members, int rank,
                       std::shared_ptr<FaultChannel> channel)
    : group_(std::move(group)),
      members_(std::move(members)),
      rank_(rank),
      channel_(std::move(channel)) {}

Position GroupWatch::position() const {
  Position position;
  position.begun = begun_.load(std::memory_order_acquire);
  position.operation = position.begun ? operation_.load(std::memory_order_relaxed) : "its creation";
  return position;
}

void GroupWatch::require_healthy(const char* operation, std::uint64_t sequence) const {
  if (const Poison* poison = this->poison()) throw_poison(operation, sequence, *poison);
}

void GroupWatch::throw_poison(const std::string& call, std::uint64_t sequence,
                              const Poison& poison) const {
  const auto text = concat("group '", group_, "', ", numbered(call, sequence), " on rank ", rank_,
                           ": ", poison.reason);
  if (poison.mismatch) throw MismatchError(text);
  if (poison.timed_out) throw TimeoutError(text, poison.ranks);
  if (poison.on_throw) {
    if (unreported() == 0) poison.on_throw();
    throw PeerFailedError(text, poison.ranks);
  }
  throw PeerLostError(text, poison.ranks);
}

void GroupWatch::set_interrupt(std::function<void()> interrupt, Of of) {
  const std::lock_guard lock(interrupt_mutex_);
  auto& place = interrupts_[static_cast<std::size_t>(of)];
  place = std::move(interrupt);
  if (place && poison()) place();
}

void GroupWatch::set_poison(Poison poison) {
  {
    const std::lock_guard lock(mutex_);
    if (first_) return;
    first_ = std::make_unique<Poison>(std::move(poison));
    poison_.store(first_.get(), std::memory_order_release);
  }
  poisoned_.notify_all();
  const std::lock_guard lock(interrupt_mutex_);
  for (const auto& interrupt : interrupts_)
    if (interrupt) interrupt();
}

void GroupWatch::note_left(int rank, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    left_.push_back(rank);
    left_text_ += concat(left_text_.empty() ? "" : "; ", text);
  }
  poisoned_.notify_all();
}

bool GroupWatch::wait_for_poison(std::chrono::milliseconds limit) const {
  std::unique_lock lock(mutex_);
  poisoned_.wait_for(lock, limit, [this] { return first_ || !left_.empty(); });
  return first_ != nullptr;
}

void GroupWatch::spread(Poison poison) {
  if (channel_) channel_->announce(group_, members_, poison);
  set_poison(std::move(poison));
}

void GroupWatch::announce(const std::string& reason) {
  spread({{rank_}, concat("rank ", rank_, " aborted: ", reason), false});
}

void GroupWatch::fail(const std::string& call, std::uint64_t sequence,
                      const std::exception_ptr& cause, std::chrono::milliseconds limit,
                      bool collective) {
  if (const Poison* known = poison()) throw_poison(call, sequence, *known);
  const std::string text = text_of(cause);
  if (says(text, {"imed out", "imeout"})) expire(call, sequence, limit, collective);
  if (!says(text, {"onnection closed", "onnection reset", "roken pipe", "onnection refused",
                   "ocket closed", "pair", "remote", "rank 0, which serves it, has ended"})) {
    // The failure is not a peer's: the others must not wait for a call that this rank could not
    // make.
    announce(concat(numbered(call, sequence), " failed there: ", text));
    throw CommError("group '", group_, "', ", numbered(call, sequence), " on rank ", rank_, ": ",
                    text);
  }
  if (channel_ && wait_for_poison(kNews)) throw_poison(call, sequence, *poison());
  Poison lost;
  {
    const std::lock_guard lock(mutex_);
    lost.ranks = left_;
    lost.reason =
        left_.empty() ? concat("a connection to another rank broke (", text, ")") : left_text_;
  }
  spread(std::move(lost));
  throw_poison(call, sequence, *poison());
}

void GroupWatch::expire(const std::string& call, std::uint64_t sequence,
                        std::chrono::milliseconds limit, bool collective) {
  if (const Poison* known = poison()) throw_poison(call, sequence, *known);
  Poison verdict;
  verdict.timed_out = true;
  std::string details;
  if (channel_) {
    std::vector<int> arrived;
    for (const RollEntry& entry : channel_->roll_call(group_, members_, kRollCall)) {
      std::string state;
      const bool begun = sequence == creation ? !entry.position.operation.empty()
                                              : collective && entry.position.begun > sequence;
      if (entry.rank == rank_ || (entry.answer == RollEntry::Answer::here && begun)) {
        arrived.push_back(entry.rank);
        continue;
      }
      switch (entry.answer) {
        case RollEntry::Answer::unknown:
          continue;
        case RollEntry::Answer::silent:
          state = "does not answer: stopped, cut off, or starved";
          break;
        case RollEntry::Answer::gone:
          state = "has ended";
          break;
        case RollEntry::Answer::here:
          if (entry.position.operation.empty())
            state = "runs, but has not made this group";
          else if (entry.position.begun == 0)
            state = "runs, and has begun no call of this group";
          else
            state = concat("runs; its newest call of this group is ", entry.position.operation,
                           " (call ", entry.position.begun - 1, ")");
          break;
      }
      if (collective || entry.answer != RollEntry::Answer::here)
        verdict.ranks.push_back(entry.rank);
      details += concat(details.empty() ? "" : "; ", "rank ", entry.rank, " ", state);
    }
    if (poison()) throw_poison(call, sequence, *poison());  // another rank was faster
    if (collective)
      details = concat("arrived: ranks ", list(arrived), "; ",
                       verdict.ranks.empty()
                           ? "none is missing, so the network or the time limit is too slow"
                           : concat("did not arrive: ", details));
  }
  verdict.reason = concat("rank ", rank_, " waited ", limit.count(), " ms in ",
                          numbered(call, sequence), details.empty() ? "" : concat("; ", details));
  spread(std::move(verdict));
  throw_poison(call, sequence, *poison());
}

}  // namespace tessera::detail
