#pragma once
// RequestState: one call of a group from its first check to its result. Blocking calls keep it on
// the stack.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/pending.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

class RequestState final : public Unfinished<void>, Pinned {
 public:
  /// `operation` is a string literal. `blocking`: the caller waits at once, and the backend is told
  /// so. Throws PeerLostError if the group is poisoned.
  RequestState(GroupState& group, const char* operation, const CallOptions& options, bool blocking);
  /// Waits if wait() was not called; errors are dropped.
  ~RequestState() override;

  GroupState& group() const { return group_; }
  const char* operation() const { return operation_; }
  std::uint64_t sequence() const { return sequence_; }
  const std::string& name() const { return card_.source.name; }
  bool blocking() const { return blocking_; }
  std::chrono::milliseconds limit() const { return limit_; }
  /// Time left until the limit, at least 1 ms.
  std::chrono::milliseconds left() const;
  /// "all_reduce 'loss'".
  std::string describe() const;

  /// To be called when the arguments are known to be sound: takes the sequence number of a
  /// collective call and tells the group's watch.
  void begin_collective();
  void begin_message();
  /// Makes this request a step of another call: it has that call's number and is not traced.
  void begin_within(const RequestState& call);

  /// Adds a work of the backend to the call. With a `card`, both ends of the message are compared
  /// if the wait lasts long.
  void add(Started started);
  /// Sets what the ranks must have in common for this call.
  void set_card(CallCard card) {
    card.source = std::move(card_.source);
    card_ = std::move(card);
    card_.operation = operation_;
  }
  const CallCard& card() const { return card_; }
  /// Records that the backend tells this call apart from another rank's different one, so that a
  /// long wait may mean that there is one.
  void set_signed() { signed_ = true; }
  /// Keeps a tensor alive until the end of the call.
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }
  void keep_group(std::shared_ptr<GroupState> group) { owner_ = std::move(group); }
  /// Adds to the payload in bytes that this rank gives, for traces.
  void count_bytes(std::int64_t bytes) { bytes_ += bytes; }
  /// Adds local work that wait() runs, in order, when all data has arrived.
  void then(std::function<void()> finish) { finish_.push_back(std::move(finish)); }
  /// Registers target = source, done when all data has arrived and the local work has run.
  void copy_back(const at::Tensor& target, const at::Tensor& source) {
    copies_.push_back({target, source});
  }
  /// Makes the call wait for `cards` before its own work; then `agreed` runs, which may throw or
  /// add work.
  void agree_first(std::shared_ptr<RequestState> cards, std::function<void()> agreed);
  /// Lets a started request continue before it is waited for, since another rank may need what
  /// follows the agreement: in a thread of its own, or, where the backend allows no other thread,
  /// inside this thread's waits.
  void go_on(const Endpoint& endpoint);
  /// Puts the call into the group's queue, for a backend that pairs the calls of two ranks by their
  /// order alone: the call queued first is agreed on and handed over first, in whatever order they
  /// are waited for.
  void queue();
  /// Records that the device's stream waits for this call, not the host.
  void on_stream() { on_stream_ = true; }

  /// Runs `body`, which hands work to a backend, and turns what the backend throws into typed
  /// errors.
  template <class F>
  void launch(F&& body) {
    try {
      body();
    } catch (...) {
      fail(std::current_exception());
    }
  }

  /// Makes the call: `body` runs one of the functions of collectives.h. Whatever it throws ends the
  /// call; an error that is not about arguments ends the group as well, since the other ranks are
  /// in a call that this rank could not make.
  template <class F>
  void start(F&& body) {
    try {
      body(*this);
    } catch (...) {
      broken(std::current_exception());
    }
  }

  bool done() override;
  void wait();
  void finish() override { wait(); }

 private:
  void wait_for_work(const Started& pending);
  void wait_once(const Started& pending);
  // Held by the thread that continues a request: the one that waits for it, or, in another wait,
  // the one that started it.
  struct Turn {
    std::recursive_mutex mutex;
    bool over = false;  // the request is gone
  };
  std::unique_lock<std::recursive_mutex> take_turn();
  void wait_for_works();
  void agree();
  bool step();
  bool step_queue();
  [[noreturn]] void fail(const std::exception_ptr& cause);
  void end_by_mismatch(std::string reason) const;
  [[noreturn]] void broken(const std::exception_ptr& cause);
  void poll();

  GroupState& group_;
  std::shared_ptr<GroupState> owner_;  // requests only: keeps group_ alive
  const char* operation_;
  std::uint64_t sequence_ = 0;
  bool begun_ = false;
  bool collective_ = false;
  bool blocking_;
  bool within_call_ = false;
  bool signed_ = false;
  CallCard card_;
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point begin_, deadline_;
  c10::SmallVector<Started, 1> works_;
  c10::SmallVector<at::Tensor, 4> kept_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> copies_;
  c10::SmallVector<std::function<void()>, 1> finish_;
  std::function<void()> agreed_;
  std::shared_ptr<RequestState> cards_;
  std::shared_ptr<const std::function<bool()>> step_;
  std::shared_ptr<Turn> turn_;  // with step_
  bool queued_ = false;
  bool stepping_ = false;
  std::int64_t bytes_ = 0;
  bool on_stream_ = false;
  bool finished_ = false;
  std::exception_ptr error_;
  // only after done() was asked of a call with works for one wait, or go_on()
  std::thread poller_;
  std::atomic<bool> polled_{false};
  std::exception_ptr poll_error_;
};

/// Adds the call, which ends now, to the trace.
void record(CommTrace& trace, const RequestState& call, std::chrono::steady_clock::time_point begin,
            std::int64_t bytes);

}  // namespace tessera::detail
