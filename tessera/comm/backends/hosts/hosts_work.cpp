#include "tessera/comm/backends/hosts/hosts_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ParallelGuard.h>

#include <chrono>
#include <exception>
#include <utility>

namespace tessera::detail {
namespace {

// Calls that were aborted usually end within this time.
constexpr std::chrono::milliseconds kCallsEnd{1000};

}  // namespace

HostsWork::HostsWork(int rank, c10d::OpType type, std::vector<at::Tensor> results,
                     std::function<void()> body)
    : OwnWork(rank, type, std::move(results)), body_(std::move(body)) {}

void HostsWork::run() {
  std::exception_ptr error;
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // Operators on this thread do not take the cores of the computation that goes on beside it.
    const c10::ParallelGuard alone(true);
    body_();
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr;
  finish(error);
}

void HostsWorker::post(const c10::intrusive_ptr<HostsWork>& work) {
  {
    const std::lock_guard lock(mutex_);
    // First: where no thread can be started, the call was not made.
    if (!thread_.joinable() && !stops_)
      thread_ = std::thread([self = shared_from_this()] { self->run(); });
    queue_.push_back(work);
  }
  changed_.notify_one();
}

void HostsWorker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
    if (queue_.empty()) break;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work->run();
    futures_->settle(work);
    work.reset();
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

void HostsWorker::close(bool leave) {
  std::unique_lock lock(mutex_);
  stops_ = true;
  changed_.notify_all();
  if (!thread_.joinable()) return;
  auto thread = std::move(thread_);
  const bool left = leave && !changed_.wait_for(lock, kCallsEnd, [this] { return ended_; });
  lock.unlock();
  if (left)
    thread.detach();
  else
    thread.join();
  futures_->close(left);
}

}  // namespace tessera::detail
