#include "tessera/comm/backends/own_work.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "tessera/base/host_lock.h"

namespace tessera::detail {

// ---- works ----

OwnWork::OwnWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
    : c10d::Work(rank, type), results_(std::move(results)) {}

std::vector<at::Tensor> OwnWork::result() {
  const WithoutHostLock released;  // c10d's Python asks with the lock
  wait();
  return results_;
}

bool OwnWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

void OwnWork::settle_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || settled_ || !completed_) return;
    settled_ = true;
    future = future_;
    error = exception_;
  }
  if (error)
    future->setError(error);
  else
    future->markCompleted(c10::IValue(results_));
}

c10::intrusive_ptr<c10::ivalue::Future> OwnWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_)
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future = future_;
  }
  settle_future();
  return future;
}

bool OwnWork::has_open_future() const {
  const std::lock_guard lock(mutex_);
  return future_ && !settled_;
}

// ---- several works as one ----

bool WorksInTurn::isCompleted() {
  return std::ranges::all_of(works_, [](auto& w) { return w->isCompleted(); });
}

bool WorksInTurn::isSuccess() const {
  return std::ranges::all_of(works_, [](auto& w) { return w->isSuccess(); });
}

std::exception_ptr WorksInTurn::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}

bool WorksInTurn::wait(std::chrono::milliseconds timeout) {
  return std::ranges::all_of(works_, [&](auto& w) { return w->wait(timeout); });
}

c10::intrusive_ptr<c10::ivalue::Future> WorksInTurn::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [results = results_](c10::ivalue::Future& all) {
        all.value();  // throws the error of any
        return c10::IValue(results);
      },
      type);
}

// ---- futures ----

void FutureThreads::settle(const c10::intrusive_ptr<OwnWork>& work) {
  if (!work->has_open_future()) return;
  {
    const std::lock_guard lock(mutex_);
    try {
      if (idle_ <= queue_.size()) {
        std::thread thread([self = shared_from_this()] { self->run(); });
        ++idle_;
        if (stops_)
          thread.detach();
        else
          threads_.push_back(std::move(thread));
      }
      queue_.push_back(work);
      changed_.notify_one();
      return;
    } catch (const std::system_error&) {  // The system has no thread left.
    }
  }
  work->settle_future();
}

void FutureThreads::run() {
  std::unique_lock lock(mutex_);
  for (;; ++idle_) {
    changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work->settle_future();
    work.reset();
    lock.lock();
  }
}

void FutureThreads::close(bool leave) {
  const WithoutHostLock released;  // callbacks of Python's need it
  std::unique_lock lock(mutex_);
  stops_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {
    auto thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    // The last owner may be a callback.
    if (leave || thread.get_id() == std::this_thread::get_id())
      thread.detach();
    else
      thread.join();
    lock.lock();
  }
}

}  // namespace tessera::detail
