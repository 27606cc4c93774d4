#pragma once
// ShmBackend: a group's collectives through memory that its ranks share.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/own_backend.h"
#include "tessera/comm/backends/shm/shm_work.h"

namespace tessera::detail {

class ShmBackend final : public OwnBackend, public SharingBackend {
 public:
  ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void abort() override { link_->abort(); }
  /// Waits for calls in progress; later calls fail. The other ranks continue without this one.
  void shutdown() override {
    link_->close();
    link_->group().interrupt("it was shut down");
  }
  /// How calls travel, and why, for reports.
  std::string describe() const { return shm::to_string(link_->group().describe()); }

  std::shared_ptr<shm::Arena> share(std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                                    std::chrono::milliseconds limit) override;

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override;
  bool moves(c10::ScalarType) const override { return true; }

 private:
  WorkPtr broadcast_one(const at::Tensor& tensor, int root, OwnCall how) override;
  WorkPtr all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op, OwnCall how) override;
  WorkPtr reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                     OwnCall how) override;
  WorkPtr all_gather_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                            OwnCall how) override;
  WorkPtr reduce_scatter_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                                const c10d::ReduceOp& op, OwnCall how) override;
  WorkPtr gather_counts(const at::Tensor& output, const at::Tensor& input, Counts counts, int root,
                        OwnCall how) override;
  WorkPtr scatter_counts(const at::Tensor& output, const at::Tensor& input, Counts counts, int root,
                         OwnCall how) override;
  WorkPtr all_to_all_counts(const at::Tensor& output, Counts output_counts, const at::Tensor& input,
                            Counts input_counts, OwnCall how) override;

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

  WorkPtr message(ShmCall call, shm::Message message);
  WorkPtr exchange_all(ShmCall call, const std::vector<shm::Message>& messages, CallLimit limit);

  shm::Group& group() { return link_->group(); }

  const std::shared_ptr<ShmLink> link_;
};

}  // namespace tessera::detail
