#pragma once
// One call over shared memory while it is under way, and the c10d::Work that waits for it.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/shm/group.h"

namespace tessera::detail {

class ShmWork;

/// The end of one group in this process: shared by the backend and its works.
///
/// Who waits for a call moves all calls of the group on. For calls that were started and that
/// nobody waits for there is a thread: it looks once a millisecond whether there are any, and if so
/// takes part until somebody waits again.
class ShmLink : public std::enable_shared_from_this<ShmLink> {
 public:
  ShmLink(shm::Group group, std::vector<int> ranks, std::shared_ptr<GroupWatch> watch)
      : group_(std::move(group)), ranks_(std::move(ranks)), watch_(std::move(watch)) {}

  shm::Group& group() { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  /// Throws the present exception, one of tessera/shm, as those of groups are. With a watch, that
  /// is told who is gone, and news that are on their way are waited for: what another rank said
  /// when it aborted, for example.
  [[noreturn]] void rethrow() const;
  /// Moves the work on from now on, and keeps it until it is complete.
  void follow(const c10::intrusive_ptr<ShmWork>& work);
  /// Ends this process' calls; those of the others too where no watch does it.
  void abort();
  /// Waits for the calls that are under way, and ends the thread.
  void close();

 private:
  // What another rank said is on its way to this one for milliseconds, as a rule. A rank that ran
  // into a limit asks the others first, before it says so.
  static constexpr std::chrono::milliseconds kWords{1000}, kVerdict{2000};
  // Computation that is shorter is left alone by the thread.
  static constexpr std::chrono::milliseconds kPatience{1};
  static constexpr std::chrono::milliseconds kNap{100};

  void move_on();
  /// Takes those that are complete out of the list; they are destroyed without the lock.
  std::vector<c10::intrusive_ptr<ShmWork>> take_complete();
  std::vector<int> global(const std::vector<int>& ranks) const;

  shm::Group group_;
  const std::vector<int> ranks_;
  const std::shared_ptr<GroupWatch> watch_;
  // guards the four below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<ShmWork>> followed_;
  bool idle_ = false;
  std::thread thread_;
  std::atomic<bool> stops_{false};
};

/// What a call keeps alive, and what is left to do when its data are there.
struct ShmCall {
  const char* name = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  /// Read or written meanwhile.
  std::vector<at::Tensor> tensors;
  /// Work::result().
  std::vector<at::Tensor> results;
  std::vector<std::function<void()>> finish;
  std::chrono::milliseconds timeout{0};
};

/// Any thread may wait.
class ShmWork : public c10d::Work, public AttentiveWork {
 public:
  /// Of a call that is complete but for its `finish`.
  ShmWork(std::shared_ptr<ShmLink> link, ShmCall call);
  ShmWork(std::shared_ptr<ShmLink> link, ShmCall call, std::vector<shm::Request> requests);
  ~ShmWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Throws TimeoutError, PeerLostError, MismatchError. `timeout` <= 0: the call's own limit; one
  /// that runs out ends the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { link_->abort(); }
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override;
  /// Completed by whoever sees the end of the call first, at the latest by the group's thread.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Without looking whether it could be.
  bool over() const;

 private:
  void complete();
  void end(std::exception_ptr error);
  void settle_future();

  const std::shared_ptr<ShmLink> link_;
  /// Held by who tests or waits; mutex_ of the base guards what the end leaves.
  std::mutex turn_;
  ShmCall call_;
  std::vector<shm::Request> requests_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

}  // namespace tessera::detail
