#pragma once
// Works of Tessera's own transports, with futures.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::detail {

/// A work of one of these transports.
class OwnWork : public c10d::Work {
 public:
  /// Waits. The tensors that the call wrote.
  std::vector<at::Tensor> result() override;
  /// Completed by a thread that waits for the work, else by one of its group's FutureThreads.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Completes the future, if it was asked for, once the work is complete. To be called without a
  /// lock, and never by a thread that other calls need: callbacks of the future run here.
  void settle_future();
  /// Whether settle_future() has anything to do.
  bool has_open_future() const;

 protected:
  OwnWork(int rank, c10d::OpType type, std::vector<at::Tensor> results);

  const std::vector<at::Tensor> results_;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

/// Completes the futures of a group's works. A callback may wait for the future of another call of
/// the group: it runs here, where it holds up no thread that moves calls on. A thread is begun
/// where none is idle, so that futures whose callbacks wait for each other are all completed.
class FutureThreads : public std::enable_shared_from_this<FutureThreads> {
 public:
  /// Has the future of a work completed that is complete itself.
  void settle(const c10::intrusive_ptr<OwnWork>& work);
  /// Waits for the callbacks and ends the threads. `leave`: does not wait.
  void close(bool leave = false);

 private:
  void run();

  // guards all below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<OwnWork>> queue_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  bool stops_ = false;
};

}  // namespace tessera::detail
