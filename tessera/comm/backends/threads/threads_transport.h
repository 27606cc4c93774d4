#pragma once
// The transport of ranks that are threads of one process. The ranks of a group share a ThreadsRoom.
// A collective is a slot: each rank puts its tensors into it, and the rank that completes the slot
// performs the whole operation for all, in rank order, so that results are exact, deterministic,
// and independent of which rank is late. Nothing is copied before all ranks have arrived, and ranks
// that put different calls into a slot all get a MismatchError.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/group_watch.h"

namespace tessera::detail {

/// What one rank puts into a slot. Tensors are views: one for each rank where an operation has
/// several, else one.
struct ThreadsCall {
  const char* operation = "";
  int root = -1;
  ReduceOp::Kind op = ReduceOp::Kind::sum;
  std::vector<at::Tensor> in, out;
  /// Empty, or called when `out` has its values.
  std::function<void()> finish;
  CallSource source;
};

struct ThreadsSlot {
  std::vector<ThreadsCall> calls;
  std::vector<bool> arrived;
  int count = 0;
  bool done = false;
  std::exception_ptr error;
};

struct ThreadsMessage {
  at::Tensor tensor;
  bool done = false;
  std::exception_ptr error;
};

/// The state that the ranks of one group share.
class ThreadsRoom {
 public:
  ThreadsRoom(std::string name, std::vector<int> ranks);

  std::shared_ptr<ThreadsSlot> enter(std::uint64_t sequence, int rank, ThreadsCall call);
  /// Sender, receiver and tag of messages that match in their order.
  using Pair = std::tuple<int, int, int>;
  std::shared_ptr<ThreadsMessage> post(const Pair& pair, const at::Tensor& tensor, bool is_send);
  /// Records that this rank makes no more calls: ranks that wait for it fail.
  void leave(int rank);
  /// Makes waiting ranks look at their watch again.
  void wake();

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }
  /// Names the global ranks that have left without entering the slot. The caller holds the mutex.
  std::vector<int> left_without(const ThreadsSlot& slot) const;
  bool has_left(int rank) const { return left_[rank]; }
  int global(int rank) const { return ranks_[rank]; }

 private:
  struct Queue {
    std::deque<std::shared_ptr<ThreadsMessage>> sends, receives;
  };

  const std::string name_;
  const std::vector<int> ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::shared_ptr<ThreadsSlot>> slots_;
  std::map<Pair, Queue> queues_;
  std::vector<bool> left_;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsRoom> room, int rank, int size,
                   std::shared_ptr<GroupWatch> watch, std::chrono::milliseconds timeout)
      : Transport(rank, size, timeout), room_(std::move(room)), watch_(std::move(watch)) {}
  ~ThreadsTransport() override { room_->leave(rank_); }

  const char* name() const override { return "threads"; }
  Abilities abilities() override;
  void broadcast(TransportCall& call) override { enter("broadcast", call, {call.output}, {}); }
  void all_reduce(TransportCall& call) override { enter("all_reduce", call, {call.output}, {}); }
  void reduce(TransportCall& call) override { enter("reduce", call, {call.output}, {}); }
  void all_gather(TransportCall& call) override;
  void reduce_scatter(TransportCall& call) override;
  void gather(TransportCall& call) override;
  void scatter(TransportCall& call) override;
  void all_to_all(TransportCall& call) override;
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override { enter("barrier", call, {}, {}); }
  void abort() override { room_->wake(); }
  void shutdown() override { room_->leave(rank_); }

 private:
  /// Puts a call into the next slot, with its tensors as a slot has them.
  void enter(const char* operation, TransportCall& call, std::vector<at::Tensor> in,
             std::vector<at::Tensor> out);

  const std::shared_ptr<ThreadsRoom> room_;
  const std::shared_ptr<GroupWatch> watch_;
  std::atomic<std::uint64_t> slots_{0};
};

}  // namespace tessera::detail
