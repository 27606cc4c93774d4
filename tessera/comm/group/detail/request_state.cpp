#include "tessera/comm/group/detail/request_state.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "tessera/base/deadline.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/trace.h"

namespace tessera::detail {
namespace {

// A blocked wait checks this often whether another thread has given up the group, for backends that
// cannot be woken.
constexpr std::chrono::milliseconds kLook{200};
// All ranks are told of a call that differs at once, and need this long to compare theirs.
constexpr std::chrono::milliseconds kVerdict{1000};
constexpr auto kNoLimit = std::chrono::milliseconds(0);  // c10d's value for waiting without a limit

}  // namespace

RequestState::RequestState(GroupState& group, const char* operation, const CallOptions& options,
                           bool blocking)
    : group_(group),
      operation_(operation),
      blocking_(blocking),
      limit_(bounded_limit(options.timeout.count() > 0 ? options.timeout : group.timeout())) {
  card_.source.name = options.name;
  begin_ = std::chrono::steady_clock::now();
  deadline_ = deadline_after(limit_, begin_);
  raising([&] { group_.watch().require_healthy(operation_, group_.sequence()); });
}

RequestState::~RequestState() {
  if ((begun_ && !finished_) || poller_.joinable()) {
    const WithoutHostLock released;  // an interpreter may be what drops it
    if (begun_ && !finished_) {
      try {
        const GroupWatch::Unreported quiet;
        wait();
      } catch (...) {  // the caller did not wait; the group is poisoned and its next call says so
      }
    }
    if (poller_.joinable()) poller_.join();
  }
  if (queued_) std::erase(group_.queued(), this);
  if (turn_) {
    const auto turn = take_turn();
    turn_->over = true;
  }
}

std::string RequestState::describe() const {
  return name().empty() ? std::string(operation_) : concat(operation_, " '", name(), "'");
}

void RequestState::begin_collective() {
  sequence_ = group_.next_sequence();
  begun_ = collective_ = true;
  if (const OriginScope* scope = OriginScope::current()) card_.source.origin = scope->origin();
  group_.watch().begin(sequence_, operation_);
}

void RequestState::begin_message() {
  sequence_ = group_.sequence();
  begun_ = true;
}

void RequestState::begin_within(const RequestState& call) {
  sequence_ = call.sequence();
  begun_ = within_call_ = true;
  collective_ = call.collective_;
}

void RequestState::add(Started started) {
  if (!started.work) return;
  if (on_stream_)
    group_.guard({started.work, deadline_, describe(), sequence_, limit_, collective_});
  works_.push_back(std::move(started));
}

std::chrono::milliseconds RequestState::left() const {
  return std::max(time_left(deadline_), std::chrono::milliseconds(1));
}

void RequestState::wait_once(const Started& pending) {
  group_.register_work(*pending.work, pending.card, &card_);
  const auto deregister = c10::make_scope_exit([&] { group_.deregister_work(*pending.work); });
  if (pending.work->wait(left())) return;
  group_.watch().require_healthy(operation_, sequence_);
  throw CommError("group '", group_.name(), "': ", describe(), " was aborted");
}

void RequestState::wait_for_work(const Started& pending) {
  if (on_stream_) {
    pending.work->wait(kNoLimit);
    // The stream waits for what an abort may have cut short: the caller must not use that.
    group_.watch().require_healthy(operation_, sequence_);
    return;
  }
  if (pending.wait == Wait::at_one_go) return wait_once(pending);
  if (pending.wait == Wait::for_all) {
    pending.work->wait(left());
    return;
  }
  // The place in the store where this rank has published that it has waited for long.
  std::string said;
  const auto withdraw = c10::make_scope_exit([&] {
    if (!said.empty()) group_.withdraw(said);
  });
  const auto begin = std::chrono::steady_clock::now();
  bool compared = !collective_ || !signed_;
  for (;;) {
    try {
      if (pending.work->wait(std::min(left(), kLook))) return;
    } catch (...) {
      // Some backends throw when the time slice is over, though the work continues, or ends at that
      // moment: a work that has ended says itself how.
      if (pending.work->isCompleted() && pending.work->wait(left())) return;
    }
    if (group_.watch().poison()) group_.watch().require_healthy(operation_, sequence_);
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline_) group_.watch().expire(describe(), sequence_, limit_, collective_);
    if (compared || now - begin < GroupState::kLong) continue;
    compared = true;
    // Cards are compared at a place of their own: a rank that still waits for them is in the same
    // call as one that waits for the data.
    if (within_call_) {
      const auto place = concat("cards of ", GroupState::call_place(sequence_));
      if (group_.compare(place, concat("waits for ", place), card_.text())) said = place;
    } else if (group_.compare_call(sequence_, card_.text())) {
      said = GroupState::call_place(sequence_);
    }
  }
}

void RequestState::agree_first(std::shared_ptr<RequestState> cards, std::function<void()> agreed) {
  cards_ = std::move(cards);
  agreed_ = std::move(agreed);
}

void RequestState::go_on(const Endpoint& endpoint) {
  turn_ = std::make_shared<Turn>();
  step_ = std::make_shared<const std::function<bool()>>([this, turn = turn_] {
    const std::unique_lock lock(turn->mutex, std::try_to_lock);
    return lock && (turn->over || step());
  });
  if (endpoint.transport->step_in_waits(step_)) return;
  step_.reset();
  turn_.reset();
  poller_ = std::thread([this] { poll(); });
}

void RequestState::queue() {
  group_.queued().push_back(this);
  queued_ = true;
}

std::unique_lock<std::recursive_mutex> RequestState::take_turn() {
  return turn_ ? std::unique_lock(turn_->mutex) : std::unique_lock<std::recursive_mutex>();
}

void RequestState::agree() {
  if (!cards_) return;
  if (queued_) {
    auto& queue = group_.queued();
    while (queue.front() != this) {
      auto& earlier = *queue.front();
      try {
        earlier.agree();
      } catch (...) {
        earlier.poll_error_ = std::current_exception();
      }
    }
    queue.pop_front();
    queued_ = false;
  }
  const auto cards = std::move(cards_);  // a wait runs step()
  cards->wait();
  const auto agreed = std::move(agreed_);
  agreed();
}

// True if this call is the next one to be agreed on.
bool RequestState::step_queue() {
  while (queued_ && group_.queued().front() != this)
    if (!group_.queued().front()->step()) return false;
  return true;
}

// True once the agreement is reached, or failed.
bool RequestState::step() {
  if (!cards_) return true;
  // testing whether the cards are there lets other calls continue, this one among them
  if (stepping_) return false;
  stepping_ = true;
  const bool met = step_queue() && cards_->done();
  stepping_ = false;
  if (!met) return false;
  try {
    agree();
  } catch (...) {
    poll_error_ = std::current_exception();
  }
  return true;
}

void RequestState::wait_for_works() {
  if (poller_.joinable()) {
    poller_.join();
    if (poll_error_) std::rethrow_exception(poll_error_);
    return;
  }
  {
    const auto turn = take_turn();
    if (poll_error_) std::rethrow_exception(poll_error_);
    agree();
  }
  for (const auto& pending : works_) wait_for_work(pending);
}

void RequestState::end_by_mismatch(std::string reason) const {
  Poison poison;
  poison.reason = std::move(reason);
  poison.mismatch = true;
  group_.watch().spread(std::move(poison));
}

void RequestState::fail(const std::exception_ptr& cause) {
  finished_ = true;
  try {
    // An error that a backend of ours raises by itself is repeated by the group's later calls.
    try {
      std::rethrow_exception(cause);
    } catch (const DifferentCalls& e) {
      // All ranks get here; those that differ from the first one report their call.
      if (collective_ && !group_.watch().poison())
        group_.compare(GroupState::call_place(sequence_), concat("calls in call ", sequence_, ": "),
                       card_.text());
      if (!group_.watch().await_news(kVerdict))
        end_by_mismatch(mismatch_text({{group_.ranks()[group_.rank()], "called " + describe()}},
                                      MismatchAt::under_way, concat(" (", e.what(), ")")));
      group_.watch().require_healthy(operation_, sequence_);
      throw;
    } catch (const FinalMismatch& e) {
      if (!group_.watch().poison()) end_by_mismatch(e.what());
      group_.watch().require_healthy(operation_, sequence_);
      throw;
    } catch (const TimeoutError& e) {
      if (e.missing().empty()) group_.watch().expire(describe(), sequence_, limit_, collective_);
      if (!group_.watch().poison()) group_.watch().spread({e.missing(), e.what(), true});
      throw;
    } catch (const PeerLostError& e) {
      // the watch knows which rank ended the group, and why
      if (e.ranks().empty()) group_.watch().require_healthy(operation_, sequence_);
      group_.watch().set_poison({e.ranks(), e.what()});
      throw;
    } catch (const Error&) {
      throw;
    } catch (...) {
      group_.watch().fail(describe(), sequence_, cause, limit_, collective_);
    }
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
}

void RequestState::broken(const std::exception_ptr& cause) {
  if (finished_) std::rethrow_exception(cause);  // raised by a backend: fail() has handled it
  try {
    std::rethrow_exception(cause);
  } catch (const Error&) {  // arguments, or ranks that disagree: nothing was handed over
    finished_ = true;
    throw;
  } catch (...) {
    fail(cause);
  }
}

void RequestState::wait() {
  // What no binding stands around, since autograd waits, is told by its class too.
  const auto tell = [this](const auto& error) { within_call_ ? error() : raising(error); };
  if (finished_) {
    if (error_) tell([this] { std::rethrow_exception(error_); });
    return;
  }
  const bool counted = !within_call_ && WaitTime::counts();
  const auto from = counted && !blocking_ ? WaitTime::Clock::now() : begin_;
  try {
    wait_for_works();
    if (!finish_.empty() || !copies_.empty()) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      for (const auto& step : finish_) step();
      for (const auto& [target, source] : copies_) target.copy_(source.view(target.sizes()));
    }
  } catch (...) {
    tell([&] { fail(std::current_exception()); });
  }
  finished_ = true;
  if (counted) WaitTime::add(WaitTime::Clock::now() - from);
  if (CommTrace* trace = group_.trace(); trace && !within_call_)
    record(*trace, *this, begin_, bytes_);
  works_.clear();
  kept_.clear();
  copies_.clear();
  finish_.clear();
}

void RequestState::poll() {
  try {
    agree();
    for (const auto& pending : works_) wait_for_work(pending);
  } catch (...) {
    poll_error_ = std::current_exception();
  }
  polled_.store(true, std::memory_order_release);
}

bool RequestState::done() {
  if (finished_) return true;
  if (poller_.joinable()) return polled_.load(std::memory_order_acquire);
  const auto turn = take_turn();
  if (!step()) return false;
  if (poll_error_) return true;
  if (std::ranges::none_of(works_, [](const Started& p) { return p.wait == Wait::at_one_go; }))
    return std::ranges::all_of(works_, [](const Started& p) { return p.work->isCompleted(); });
  poller_ = std::thread([this] { poll(); });
  return polled_.load(std::memory_order_acquire);
}

}  // namespace tessera::detail
