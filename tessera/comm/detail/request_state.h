#pragma once
// RequestState: one call of a group from its first check to its result. Blocking calls keep it on the stack.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tessera/comm/detail/group_state.h"
#include "tessera/comm/types.h"

namespace tessera::detail {

class RequestState {
 public:
  /// `operation` is a string literal. Begins the call: takes a sequence number if `collective`, and throws PeerLostError if the group is poisoned.
  RequestState(GroupState& group, const char* operation, bool collective, const CallOptions& options);
  ~RequestState();  ///< Waits if wait() was not called; errors are dropped.
  RequestState(const RequestState&) = delete;
  RequestState& operator=(const RequestState&) = delete;

  GroupState& group() const { return group_; }
  const char* operation() const { return operation_; }
  std::uint64_t sequence() const { return sequence_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds limit() const { return limit_; }
  /// "all_reduce 'loss' (call 12 of group 'world', rank 1)": how errors begin.
  std::string describe() const;

  /// `whole`: the work must be waited for in one piece (a wait that runs out breaks Gloo's messages), and only tells by wait() that it is done.
  void add(c10::intrusive_ptr<c10d::Work> work, bool whole = false);
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }      ///< Alive until the end of the call.
  void keep_group(std::shared_ptr<GroupState> group) { owner_ = std::move(group); }
  void count_bytes(std::int64_t bytes) { bytes_ += bytes; }             ///< Payload that this rank gives, for traces.
  void then(std::function<void()> finish) { finish_ = std::move(finish); }  ///< Local part, run by wait().
  /// Work of a device whose stream, not the host, waits.
  void on_stream() { on_stream_ = true; }

  /// Runs `launch`, and turns what a backend throws into the typed errors.
  template <class F>
  void launch(F&& body) {
    try {
      body();
    } catch (const Error&) {
      abandon();
      throw;
    } catch (...) {
      fail(std::current_exception());
    }
  }

  bool done();
  void wait();

 private:
  struct Part {
    c10::intrusive_ptr<c10d::Work> work;
    bool whole = false;
  };
  void wait_part(Part& part);
  void wait_parts();
  [[noreturn]] void fail(const std::exception_ptr& cause);
  void abandon();
  std::chrono::milliseconds left() const;

  GroupState& group_;
  std::shared_ptr<GroupState> owner_;  // requests only: keeps group_ alive
  const char* operation_;
  std::string name_;
  std::uint64_t sequence_ = 0;
  bool collective_;
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point begin_, deadline_;
  c10::SmallVector<Part, 1> parts_;
  c10::SmallVector<at::Tensor, 4> kept_;
  std::function<void()> finish_;
  std::int64_t bytes_ = 0;
  bool on_stream_ = false;
  bool finished_ = false;
  std::exception_ptr error_;
  std::thread poller_;  // only after done() was asked of a call with `whole` parts
  std::atomic<bool> polled_{false};
  std::exception_ptr poll_error_;
};

}  // namespace tessera::detail
