#include "tessera/comm/backends/shm/shm_work.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

namespace tessera::detail {

// ---- the link ----

std::vector<int> ShmLink::global(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (const int r : ranks) {
    const auto i = static_cast<std::size_t>(r);
    result.push_back(i < ranks_.size() ? ranks_[i] : r);
  }
  return result;
}

void ShmLink::rethrow() const {
  try {
    throw;
  } catch (const shm::TimeoutError& error) {
    if (!watch_) throw TimeoutError(error.what(), global(error.missing()));
    if (error.heard() && watch_->await_news(kVerdict)) throw PeerLostError(error.what(), {});
    // Without ranks the group asks which are missing.
    throw TimeoutError(error.what(), {});
  } catch (const shm::PeerLostError& error) {
    if (!watch_) throw PeerLostError(error.what(), global(error.ranks()));
    if (!watch_->await_news(kWords)) watch_->set_poison({global(error.ranks()), error.what()});
    throw PeerLostError(error.what(), {});
  } catch (const shm::MismatchError& error) {
    throw DifferentCalls(error.what());
  }
}

void ShmLink::abort() {
  if (!watch_) return group_.abort("it was told to abort");
  const Poison* poison = watch_->poison();
  group_.interrupt(poison ? poison->reason : "the group was aborted");
}

void ShmLink::follow(const c10::intrusive_ptr<ShmWork>& work) {
  std::vector<c10::intrusive_ptr<ShmWork>> ended;
  std::unique_lock lock(mutex_);
  if (stops_) {
    lock.unlock();
    return work->finish();
  }
  for (auto& known : followed_)
    if (known->over()) ended.push_back(std::move(known));
  std::erase(followed_, nullptr);
  followed_.push_back(work);
  if (!thread_.joinable()) thread_ = std::thread([link = shared_from_this()] { link->move_on(); });
  if (idle_) changed_.notify_one();
}

std::vector<c10::intrusive_ptr<ShmWork>> ShmLink::take_complete() {
  std::vector<c10::intrusive_ptr<ShmWork>> all, complete;
  {
    const std::lock_guard lock(mutex_);
    all = followed_;
  }
  for (const auto& work : all) {
    if (!work->advance()) continue;
    futures_->settle(work);
    complete.push_back(work);
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(followed_, [&](const auto& work) {
    return std::ranges::find(complete, work) != complete.end();
  });
  return complete;
}

void ShmLink::move_on() {
  std::unique_lock lock(mutex_);
  while (!stops_) {
    idle_ = true;
    changed_.wait(lock, [this] { return stops_ || !followed_.empty(); });
    idle_ = false;
    changed_.wait_for(lock, kPatience, [this] { return stops_.load(); });
    lock.unlock();
    while (!stops_ && group_.neglected()) {
      group_.drive(kNap);
      take_complete();
    }
    take_complete();
    lock.lock();
  }
}

void ShmLink::close() {
  std::vector<c10::intrusive_ptr<ShmWork>> rest;
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    thread = std::move(thread_);
  }
  changed_.notify_all();
  group_.nudge();
  if (thread.joinable()) thread.join();
  {
    const std::lock_guard lock(mutex_);
    rest.swap(followed_);
  }
  for (const auto& work : rest) {
    work->finish();
    futures_->settle(work);
  }
  futures_->close();
}

// ---- the work ----

ShmWork::ShmWork(std::shared_ptr<ShmLink> link, TransportCall& call,
                 std::vector<shm::Request> requests)
    : OwnWork(link->rank(), call.type, call.results),
      link_(std::move(link)),
      tensors_{call.output, call.input},
      finish_(std::exchange(call.finish, nullptr)),
      timeout_(call.timeout),
      requests_(std::move(requests)) {
  for (const auto& message : call.messages) tensors_.push_back(message.tensor);
}

ShmWork::~ShmWork() { requests_.clear(); }

bool ShmWork::over() const {
  const std::lock_guard lock(mutex_);
  return completed_ || exception_;
}

// To be called with the turn held.
void ShmWork::complete() {
  if (!requests_.empty()) source_ = requests_.front().source();
  if (finish_) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    finish_();
  }
  end(nullptr);
}

void ShmWork::end(std::exception_ptr error) {
  requests_.clear();
  tensors_.clear();
  finish_ = nullptr;
  const std::lock_guard lock(mutex_);
  exception_ = std::move(error);
  completed_ = true;
}

bool ShmWork::advance() {
  if (over()) return true;
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn || over()) return over();
  try {
    for (auto& request : requests_)
      if (!request.test()) return false;
    complete();
  } catch (...) {
    fail();
  }
  return true;
}

void ShmWork::finish(std::chrono::milliseconds timeout) {
  const std::lock_guard turn(turn_);
  if (over()) return;
  try {
    for (auto& request : requests_) request.wait(timeout.count() > 0 ? timeout : timeout_);
    complete();
  } catch (...) {
    fail();
  }
}

// Ends the call with the current exception.
void ShmWork::fail() {
  try {
    try {
      throw;
    } catch (const Error&) {
      link_->rethrow();
    }
  } catch (...) {
    end(std::current_exception());
  }
}

bool ShmWork::isCompleted() {
  if (!advance()) return false;
  settle_future();
  return true;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  finish(timeout);
  settle_future();
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

}  // namespace tessera::detail
