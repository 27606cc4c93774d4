#pragma once
// One call in progress over shared memory, and the c10d::Work that waits for it.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/backends/own_work.h"
#include "tessera/comm/backends/transport_call.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/shm/group.h"

namespace tessera::detail {

class ShmWork;

/// This process' end of one group: shared by the backend and its works.
///
/// A thread that waits for a call continues all calls of the group. For calls that were started and
/// are not waited for there is a background thread: it looks once per millisecond whether there are
/// any, and continues them until some thread waits again.
class ShmLink : public std::enable_shared_from_this<ShmLink> {
 public:
  ShmLink(shm::Group group, std::vector<int> ranks, std::shared_ptr<GroupWatch> watch)
      : group_(std::move(group)), ranks_(std::move(ranks)), watch_(std::move(watch)) {}

  shm::Group& group() { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  /// Rethrows the current exception, one of tessera/shm, as the corresponding error of groups. With
  /// a watch, the watch is told which rank is gone, and news on the way is waited for: the reason
  /// that another rank gave when it aborted, for example.
  [[noreturn]] void rethrow() const;
  /// Keeps the work until it is complete, and continues it in the background. Once the link was
  /// closed: completes it.
  void follow(const c10::intrusive_ptr<ShmWork>& work);
  /// Ends this process' calls, and, without a watch, also those of the other ranks.
  void abort();
  /// Waits for calls in progress and ends the thread.
  void close();

 private:
  // What another rank has announced usually arrives within milliseconds. A rank that ran into a
  // limit asks the others before it announces anything.
  static constexpr std::chrono::milliseconds kWords{1000}, kVerdict{2000};
  // The thread leaves computation that is shorter than this alone.
  static constexpr std::chrono::milliseconds kPatience{1};
  static constexpr std::chrono::milliseconds kNap{100};

  void move_on();
  /// Removes complete works from the list and returns them, to be destroyed without the lock.
  std::vector<c10::intrusive_ptr<ShmWork>> take_complete();
  std::vector<int> global(const std::vector<int>& ranks) const;

  shm::Group group_;
  const std::vector<int> ranks_;
  const std::shared_ptr<GroupWatch> watch_;
  const std::shared_ptr<FutureThreads> futures_ = std::make_shared<FutureThreads>();
  // guards the four below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<ShmWork>> followed_;
  bool idle_ = false;
  std::thread thread_;
  std::atomic<bool> stops_{false};
};

/// A call as a c10d::Work, for which any thread may wait. Its future is completed by a thread that
/// waits for the work, at the latest by one of the group's.
class ShmWork : public OwnWork {
 public:
  /// Takes the results and `finish` of the call.
  ShmWork(std::shared_ptr<ShmLink> link, TransportCall& call, std::vector<shm::Request> requests);
  ~ShmWork() override;

  bool isCompleted() override;
  /// Throws TimeoutError, PeerLostError, MismatchError. `timeout` <= 0: the call's own limit; a
  /// limit that runs out ends the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { link_->abort(); }
  int sourceRank() const override { return source_; }

  /// Whether the call is known to be complete, without testing it.
  bool over() const;
  /// Does what isCompleted() and wait() do, but leaves the future alone, and throws nothing.
  bool advance();
  void finish(std::chrono::milliseconds timeout = kNoTimeout);

 private:
  void complete();
  void end(std::exception_ptr error);
  void fail();

  const std::shared_ptr<ShmLink> link_;
  /// Held while testing or waiting; mutex_ of the base class guards what the end leaves.
  std::mutex turn_;
  /// Read or written during the call.
  std::vector<at::Tensor> tensors_;
  std::function<void()> finish_;
  const std::chrono::milliseconds timeout_;
  std::vector<shm::Request> requests_;
  int source_ = -1;
};

}  // namespace tessera::detail
