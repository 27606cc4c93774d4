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

 private:
  const std::vector<at::Tensor> results_;
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

/// What a collective of one of these backends has beside its data.
struct OwnCall {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  CallLimit limit;
  /// The result of Work::result().
  std::vector<at::Tensor> results;
  /// Empty, or called when the data have arrived.
  std::function<void()> finish;
};

/// A backend implements what is pure virtual here. Its tensors are dense, on the CPU and of one
/// dtype, and have the numbers of elements that the counts say: what does not throws
/// InvalidArgument before.
class OwnBackend : public c10d::Backend,
                   public UnevenBackend,
                   public ReducingBackend,
                   public SigningBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Elements, one number per rank.
  using Counts = std::vector<std::int64_t>;

  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Virtual in newer releases of c10d alone. NOLINTNEXTLINE(modernize-use-override)
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void sign(std::uint64_t call) override { signature_ = call; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  /// `outputs[r][i]` gets `inputs[i]` of rank r; all travel in one call, as bytes.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
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

  virtual WorkPtr broadcast_one(const at::Tensor& tensor, int root, OwnCall how) = 0;
  virtual WorkPtr all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                 OwnCall how) = 0;
  virtual WorkPtr reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                             OwnCall how) = 0;
  virtual WorkPtr all_gather_counts(const at::Tensor& output, const at::Tensor& input,
                                    Counts counts, OwnCall how) = 0;
  virtual WorkPtr reduce_scatter_counts(const at::Tensor& output, const at::Tensor& input,
                                        Counts counts, const c10d::ReduceOp& op, OwnCall how) = 0;
  /// `output` is undefined on the ranks other than root.
  virtual WorkPtr gather_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                                int root, OwnCall how) = 0;
  /// `input` is undefined on the ranks other than root.
  virtual WorkPtr scatter_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                                 int root, OwnCall how) = 0;
  /// Counts are this rank's own.
  virtual WorkPtr all_to_all_counts(const at::Tensor& output, Counts output_counts,
                                    const at::Tensor& input, Counts input_counts, OwnCall how) = 0;

  void require_rank(int rank, const char* what) const;
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
  std::int64_t count_here(const Counts& counts) const {
    return counts[static_cast<std::size_t>(rank_)];
  }
  Counts counts_of_splits(const at::Tensor& tensor, const Counts& splits, const char* which) const;

  WorkPtr checked_all_gather(const at::Tensor& output, const at::Tensor& input, Counts counts,
                             OwnCall how);
  WorkPtr checked_reduce_scatter(const at::Tensor& output, const at::Tensor& input, Counts counts,
                                 const c10d::ReduceOp& op, OwnCall how);
  WorkPtr checked_gather(const at::Tensor& output, const at::Tensor& input, Counts counts, int root,
                         OwnCall how);
  WorkPtr checked_scatter(const at::Tensor& output, const at::Tensor& input, Counts counts,
                          int root, OwnCall how);
};

}  // namespace tessera::detail
