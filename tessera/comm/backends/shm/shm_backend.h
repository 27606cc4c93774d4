#pragma once
// ShmBackend: a group's collectives through memory that its ranks share.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/shm/shm_work.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

class ShmBackend final : public c10d::Backend,
                         public UnevenBackend,
                         public ReducingBackend,
                         public SigningBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Virtual in newer releases of c10d alone. NOLINTNEXTLINE(modernize-use-override)
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void abort() override { link_->abort(); }
  /// Waits for calls in progress; later calls fail. The other ranks continue without this one.
  void shutdown() override {
    link_->close();
    link_->group().interrupt("it was shut down");
  }
  /// How calls travel, and why, for reports.
  std::string describe() const { return shm::to_string(link_->group().describe()); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  WorkPtr all_gather_v(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& sizes, CallLimit limit) override;
  WorkPtr reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<std::int64_t>& sizes, const c10d::ReduceOp& op,
                           CallLimit limit) override;
  WorkPtr gather_v(const at::Tensor& output, const at::Tensor& input,
                   const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;
  WorkPtr scatter_v(const at::Tensor& output, const at::Tensor& input,
                    const std::vector<std::int64_t>& sizes, int root, CallLimit limit) override;
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override;
  bool moves(c10::ScalarType) const override { return true; }
  void sign(std::uint64_t call) override { signature_ = call; }

 private:
  /// Elements, one number per rank.
  using Counts = std::vector<std::int64_t>;

  /// Makes one call. `block` runs it to its end, `start` begins it; both get its options.
  template <class Block, class Start>
  WorkPtr run(ShmCall call, CallLimit limit, std::uint64_t sign, const Block& block,
              const Start& start);
  /// As run(), for several calls that are started together: `start` adds its requests to a list.
  template <class Start>
  WorkPtr run_all(ShmCall call, CallLimit limit, std::uint64_t sign, const Start& start);
  /// Makes a collective from messages, with a barrier beside them in which it is compared with what
  /// the other ranks call.
  template <class Start>
  WorkPtr run_messages(ShmCall call, CallLimit limit, std::uint64_t sign, const Start& start);
  /// The options of a call: its time limit, and what all ranks must have in common.
  shm::Call options(ShmCall& call, CallLimit limit, std::uint64_t sign);
  /// A signature of the next call: the group's, combined with the dtype.
  std::uint64_t signature(c10::ScalarType dtype);

  WorkPtr all_gather_counts(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                            CallLimit limit, ShmCall call);
  WorkPtr reduce_scatter_counts(const at::Tensor& output, const at::Tensor& input,
                                const Counts& counts, const c10d::ReduceOp& op, CallLimit limit,
                                ShmCall call);
  WorkPtr gather_counts(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                        int root, CallLimit limit, ShmCall call);
  WorkPtr scatter_counts(const at::Tensor& output, const at::Tensor& input, const Counts& counts,
                         int root, CallLimit limit, ShmCall call);
  WorkPtr message(ShmCall call, shm::Message message);
  WorkPtr exchange_all(ShmCall call, const std::vector<shm::Message>& messages, CallLimit limit);

  void require_rank(int rank, const char* what) const;
  void require_sizes(const Counts& sizes, const char* name) const;
  int ranks() const { return size_; }
  shm::Group& group() { return link_->group(); }

  const std::shared_ptr<ShmLink> link_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> sequence_{0};
  /// The signature of the next collective, as the group announced it.
  std::uint64_t signature_ = 0;
};

}  // namespace tessera::detail
