#pragma once
// Classes that several files here hand to Python, and how groups, limits and reduce operations look
// there.

#include <torch/custom_class.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/state.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/group/pending.h"
#include "tessera/mesh/groups/group_config.h"

namespace tessera::python {

struct PyGroup : torch::CustomClassHolder {
  explicit PyGroup(Group g) : group(std::move(g)) {}
  Group group;
};
using GroupPtr = c10::intrusive_ptr<PyGroup>;

/// What this rank has started and another thread has dropped: Python's collector runs on any. To
/// wait there could be to wait for that thread's own call, so that this rank ends it.
class DroppedElsewhere {
 public:
  /// Of this thread, which is a rank.
  static std::shared_ptr<DroppedElsewhere> here();

  /// `done`: owns what was started, and says whether it is over. False: the rank's thread is over.
  bool add(std::function<bool()> done);
  /// To be called by the rank: lets go what is over, or all of it, for which it waits.
  void let_go(bool all);
  /// The rank's thread ends.
  void close();

 private:
  std::mutex mutex_;
  std::vector<std::function<bool()>> started_;
  bool closed_ = false;
};

/// A Pending that Python holds.
template <class T>
class Started {
 public:
  explicit Started(Pending<T> pending)
      : pending_(std::make_shared<Pending<T>>(std::move(pending))), by_(DroppedElsewhere::here()) {
    by_->let_go(false);
  }
  ~Started() {
    if (!pending_ || waited_ || by_ == DroppedElsewhere::here()) return;
    by_->add([pending = std::move(pending_)] { return pending->done(); });
  }
  Started(Started&&) noexcept = default;
  Started& operator=(Started&&) = delete;

  bool done() const { return pending_->done(); }
  T wait() {
    waited_ = true;
    return pending_->wait();
  }

 private:
  std::shared_ptr<Pending<T>> pending_;
  bool waited_ = false;
  std::shared_ptr<DroppedElsewhere> by_;
};

using MaybeTensor = std::optional<at::Tensor>;

/// What was started: a call, or one that gives a tensor.
struct PyRequest : torch::CustomClassHolder {
  explicit PyRequest(Request r) : request(std::move(r)) {}
  explicit PyRequest(Pending<at::Tensor> v) : value(std::move(v)) {}
  bool done() const { return value ? value->done() : request->done(); }
  MaybeTensor wait() {
    if (!value) {
      request->wait();
      return std::nullopt;
    }
    at::Tensor arrived = value->wait();
    return arrived.defined() ? MaybeTensor(arrived) : std::nullopt;
  }
  std::optional<Started<void>> request;
  std::optional<Started<at::Tensor>> value;
};
using RequestPtr = c10::intrusive_ptr<PyRequest>;

struct PyCheckpointState : torch::CustomClassHolder {
  CheckpointState state;
};
using StatePtr = c10::intrusive_ptr<PyCheckpointState>;

/// "sum", "avg", "product", "min", "max", or "premultiplied" by `factor`. Throws InvalidArgument.
ReduceOp reduce_op(const std::string& name, double factor = 1);

/// Backend and time limit of a group; empty and 0: the manager's.
GroupOptions group_options(const std::string& backend, double seconds);

std::vector<int> to_ints(const std::vector<std::int64_t>& numbers);
std::vector<std::int64_t> from_ints(const std::vector<int>& numbers);

}  // namespace tessera::python
