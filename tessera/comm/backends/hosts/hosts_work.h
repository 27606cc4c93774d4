#pragma once
// HostsWork: a collective over several hosts, done step by step in a thread of its group.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/backends/own_work.h"

namespace tessera::detail {

class HostsWork : public OwnWork {
 public:
  HostsWork(int rank, c10d::OpType type, std::vector<at::Tensor> results,
            std::function<void()> body);

  /// Does the call. What it throws, wait() throws. Leaves the future to the caller.
  void run();

 private:
  std::function<void()> body_;
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

  const std::shared_ptr<FutureThreads> futures_ = std::make_shared<FutureThreads>();
  // guards all below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<HostsWork>> queue_;
  bool stops_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace tessera::detail
