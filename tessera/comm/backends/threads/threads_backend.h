#pragma once
// The backend of ranks that are threads of one process. The ranks of a group share a ThreadsRoom. A
// collective is a slot: each rank puts its tensors into it, and the rank that completes the slot
// performs the whole operation for all, in rank order, so that results are exact, deterministic,
// and independent of which rank is late. Nothing is copied before all ranks have arrived, and ranks
// that put different calls into a slot all get a MismatchError.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

/// What one rank puts into a slot. Tensors are views: one for each rank where an operation has
/// several, else one.
struct ThreadsCall {
  const char* operation = "";
  int root = -1;
  ReduceOp::Kind op = ReduceOp::Kind::sum;
  std::vector<at::Tensor> in, out;
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
  std::shared_ptr<ThreadsMessage> send(int from, int to, int tag, const at::Tensor& tensor);
  std::shared_ptr<ThreadsMessage> receive(int from, int to, int tag, const at::Tensor& tensor);
  /// Records that this rank makes no more calls: ranks that wait for it fail.
  void leave(int rank);
  /// Makes waiting ranks look at their watch again.
  void wake();

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }
  /// With the mutex held: the global ranks that have left without entering the slot.
  std::vector<int> left_without(const ThreadsSlot& slot) const;
  bool has_left(int rank) const { return left_[rank]; }
  int global(int rank) const { return ranks_[rank]; }

 private:
  using Pair = std::tuple<int, int, int>;
  struct Queue {
    std::deque<std::shared_ptr<ThreadsMessage>> sends, receives;
  };
  std::shared_ptr<ThreadsMessage> post(const Pair& pair, const at::Tensor& tensor, bool is_send);

  const std::string name_;
  const std::vector<int> ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::shared_ptr<ThreadsSlot>> slots_;
  std::map<Pair, Queue> queues_;
  std::vector<bool> left_;
};

class ThreadsBackend : public c10d::Backend, public UnevenBackend, public ReducingBackend {
 public:
  ThreadsBackend(std::shared_ptr<ThreadsRoom> room, int rank, int size,
                 std::shared_ptr<GroupWatch> watch, std::chrono::milliseconds timeout);
  ~ThreadsBackend() override;

  const std::string getBackendName() const override { return "threads"; }
  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override;
  bool moves(c10::ScalarType) const override { return true; }
  void abort() override;
  void shutdown() override;

  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  // The names with "_base" exist in every supported libtorch; newer ones forward their renamed
  // calls to them.
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input,
                              const c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input,
                            std::vector<std::int64_t>& output_sizes,
                            std::vector<std::int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& options) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;

  WorkPointer all_gather_v(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<std::int64_t>& sizes, CallLimit limit) override;
  WorkPointer reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                               const std::vector<std::int64_t>& sizes, const c10d::ReduceOp& op,
                               CallLimit limit) override;
  WorkPointer gather_v(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;
  WorkPointer scatter_v(const at::Tensor& output, const at::Tensor& input,
                        const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;
  WorkPointer exchange(const std::vector<Message>& messages, CallLimit limit) override;

 private:
  WorkPointer enter(ThreadsCall call, std::chrono::milliseconds timeout);

  const std::shared_ptr<ThreadsRoom> room_;
  const std::shared_ptr<GroupWatch> watch_;
  const std::chrono::milliseconds timeout_;
  std::uint64_t next_ = 0;
};

}  // namespace tessera::detail
