#pragma once
// What Tessera's own backends for CPU tensors share: c10d's collectives on lists and on one tensor,
// even and uneven, as collectives with one number of elements per rank; and a work with a future.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

template <class Options>
CallLimit limit_of(const Options& options) {
  return {options.timeout, !options.asyncOp};
}

/// A work of one of these backends.
class OwnWork : public c10d::Work {
 public:
  /// Waits. The tensors that the call wrote.
  std::vector<at::Tensor> result() override;
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

/// One collective of one of these backends. Tensors are dense, on the CPU and of one dtype, and
/// have the numbers of elements that the counts say: what does not throws InvalidArgument before.
struct OwnCall {
  using Tensors = std::vector<at::Tensor>;
  /// Elements, one number per rank.
  using Counts = std::vector<std::int64_t>;

  c10d::OpType type = c10d::OpType::UNKNOWN;
  CallLimit limit;
  /// The result of Work::result().
  Tensors results;
  /// Broadcast, all-reduce and reduce work in place on `output`. Undefined on the ranks other than
  /// root: the output of gather, and the input of scatter.
  at::Tensor output, input;
  /// The same on all ranks; of all-to-all this rank's own, with `input_counts`.
  Counts counts, input_counts;
  c10d::ReduceOp op{};
  int root = -1;
  /// Empty, or called when the data have arrived.
  std::function<void()> finish;
};

/// A backend implements what is pure virtual here, and what c10d::Backend has for messages and
/// barriers.
class OwnBackend : public c10d::Backend, public UnevenBackend {
 public:
  using Tensors = OwnCall::Tensors;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Counts = OwnCall::Counts;

  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Virtual in newer releases of c10d alone. NOLINTNEXTLINE(modernize-use-override)
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  /// `outputs[r][i]` gets `inputs[i]` of rank r; all travel in one call, as bytes.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  /// All outputs and inputs have the same number of elements.
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  /// All outputs and inputs have the same number of elements.
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  /// A barrier whose error names the ranks that did not come, on every rank.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all_ranks) override;

  WorkPtr all_gather_v(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& sizes, CallLimit limit) override;
  WorkPtr reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<std::int64_t>& sizes, const c10d::ReduceOp& op,
                           CallLimit limit) override;
  WorkPtr gather_v(const at::Tensor& output, const at::Tensor& input,
                   const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;
  WorkPtr scatter_v(const at::Tensor& output, const at::Tensor& input,
                    const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;

 protected:
  OwnBackend(int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), timeout_(timeout) {}

  virtual WorkPtr broadcast_one(OwnCall call) = 0;
  virtual WorkPtr all_reduce_one(OwnCall call) = 0;
  virtual WorkPtr reduce_one(OwnCall call) = 0;
  virtual WorkPtr all_gather_counts(OwnCall call) = 0;
  virtual WorkPtr reduce_scatter_counts(OwnCall call) = 0;
  virtual WorkPtr gather_counts(OwnCall call) = 0;
  virtual WorkPtr scatter_counts(OwnCall call) = 0;
  virtual WorkPtr all_to_all_counts(OwnCall call) = 0;
  // Several collectives as one call: OwnCall::results are the outputs, each has a dtype of its own,
  // and they are made in turn unless a backend starts them together.
  virtual WorkPtr all_reduce_each(OwnCall call);
  virtual WorkPtr all_gather_each(const Tensors& inputs, OwnCall call);
  virtual WorkPtr reduce_scatter_each(const Tensors& inputs, OwnCall call);
  /// One input and one output for each rank; those for this rank itself have as many elements.
  virtual WorkPtr all_to_all_each(const Tensors& inputs, OwnCall call) = 0;

  /// Those that all of these backends have, to which a backend adds its own.
  Abilities own_abilities(bool (*reduces)(c10::ScalarType, ReduceOp::Kind));
  std::chrono::milliseconds limit_of_call(CallLimit limit) const {
    return bounded_limit(limit.timeout.count() > 0 ? limit.timeout : timeout_);
  }
  /// Throws InvalidArgument if the group has no such rank.
  int required_rank(std::int64_t rank, const char* what) const;
  int ranks() const { return size_; }
  Counts same_for_all(std::int64_t count) const {
    return Counts(static_cast<std::size_t>(size_), count);
  }

  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> sequence_{0};
  /// The signature of the next collective, as the group announced it.
  std::uint64_t signature_ = 0;

 private:
  void require_sizes(const Counts& sizes, const char* name) const;
  void require_list(const TensorLists& lists, const char* name, const char* what) const;
  void require_each(const Tensors& wholes, const Tensors& parts, const char* name) const;
  std::int64_t count_here(const Counts& counts) const {
    return counts[static_cast<std::size_t>(rank_)];
  }
  Counts counts_of_splits(const at::Tensor& tensor, const Counts& splits, const char* which) const;

  WorkPtr in_turn(OwnCall& call, const std::function<WorkPtr(std::size_t)>& make);
  WorkPtr checked_all_gather(OwnCall call);
  WorkPtr checked_reduce_scatter(OwnCall call);
  WorkPtr checked_gather(OwnCall call);
  WorkPtr checked_scatter(OwnCall call);
};

}  // namespace tessera::detail
