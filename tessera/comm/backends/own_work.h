#pragma once
// Works of Tessera's own transports, with futures.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::detail {

/// A work of one of these transports.
class OwnWork : public c10d::Work {
 public:
  /// Waits. The tensors that the call wrote.
  std::vector<at::Tensor> result() override;
  /// True once the work has ended without an error.
  bool isSuccess() const override;
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

/// The work of a call that was complete when it returned.
class DoneWork final : public OwnWork {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
      : OwnWork(rank, type, std::move(results)) {
    finish();
  }
};

/// Several works as one.
class WorksInTurn final : public OwnWork {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  WorksInTurn(int rank, std::vector<at::Tensor> results, Works works)
      : OwnWork(rank, c10d::OpType::COALESCED, std::move(results)), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Works works_;
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
