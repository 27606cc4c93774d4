#pragma once
// AsC10d: a backend of c10d over a transport, for code written on c10d. c10d's collectives on lists
// and on one tensor become calls with one number of elements per rank; reductions are as exact as
// those of groups (Recipe).

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

class AsC10d final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Counts = TransportCall::Counts;

  explicit AsC10d(std::shared_ptr<Transport> transport);

  Transport& transport() const { return *transport_; }
  const std::string getBackendName() const override { return transport_->name(); }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Virtual in newer releases of c10d alone. NOLINTNEXTLINE(modernize-use-override)
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void abort() override { transport_->abort(); }
  void shutdown() override { transport_->shutdown(); }

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
  /// All tensors have the same number of elements unless the transport gathers any sizes.
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
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  /// A barrier whose error names the first rank that did not come, or `all_ranks` that did not, on
  /// every rank; where all of them share a host.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all_ranks) override;

  /// Makes a call of the transport.
  WorkPtr hand(TransportCall& call, Transport::Function make);

 private:
  template <class How>
  TransportCall call_of(c10d::OpType type, const How& options) const;
  int required_rank(std::int64_t rank, const char* what) const;
  void require_list(const TensorLists& lists, const char* name, const char* what) const;
  void require_each(const Tensors& wholes, const Tensors& parts, const char* name) const;
  Counts counts_of_splits(const at::Tensor& tensor, const Counts& splits, const char* which) const;
  WorkPtr in_turn(const Tensors& results, const std::function<WorkPtr(std::size_t)>& make) const;
  WorkPtr reduce_scatter(TransportCall& call, const at::Tensor& output, const at::Tensor& input,
                         Counts counts, const c10d::ReduceOp& op);
  WorkPtr reduced(TransportCall& call, const char* name, const at::Tensor& tensor,
                  const c10d::ReduceOp& op, bool writes, Transport::Function make);
  /// A gather or scatter of this rank's `part` and, on the root, the tensors of `lists`.
  WorkPtr rooted(TransportCall& call, const at::Tensor& part, const TensorLists& lists,
                 bool gathers);
  WorkPtr message(Message::Kind kind, c10d::OpType type, const at::Tensor& tensor, int peer,
                  int tag);

  const std::shared_ptr<Transport> transport_;
  const Abilities can_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace tessera::detail
