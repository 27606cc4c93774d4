#pragma once
// HostsWork: a collective over several hosts, done step by step in a thread of its group.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::detail {

class HostsWork : public c10d::Work {
 public:
  HostsWork(int rank, c10d::OpType type, std::vector<at::Tensor> results,
            std::function<void()> body);

  /// Does the call. What it throws, wait() throws.
  void run();
  std::vector<at::Tensor> result() override;
  /// Completed by the thread that does the call.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void settle_future();

  const std::vector<at::Tensor> results_;
  std::function<void()> body_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

/// Does the collectives of one group in the order in which they were made, in a thread that begins
/// with the first of them.
class HostsWorker : public std::enable_shared_from_this<HostsWorker> {
 public:
  void post(const c10::intrusive_ptr<HostsWork>& work);
  /// Ends the thread after the calls that were made. `leave`: does not wait for it long, since its
  /// call may be in a wait that nothing but a time limit ends.
  void close(bool leave);

 private:
  void run();

  // guards all below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<HostsWork>> queue_;
  bool stops_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace tessera::detail
