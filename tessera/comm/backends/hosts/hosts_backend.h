#pragma once
// HostsBackend: a group over several hosts, of whose ranks some share one. Collectives go through
// memory inside a host and over another backend between the hosts' leaders; a message goes through
// memory if its ends share a host, and over the other backend otherwise.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/hosts/host_links.h"
#include "tessera/comm/backends/hosts/hosts_work.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

class HostsBackend final : public c10d::Backend,
                           public UnevenBackend,
                           public ReducingBackend,
                           public SigningBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Counts = HostLinks::Counts;

  /// `tells`: a call that fails here ends the calls of the other ranks; for groups without a watch.
  HostsBackend(std::shared_ptr<HostLinks> links, int rank, std::chrono::milliseconds timeout,
               bool tells);
  ~HostsBackend() override;

  const std::string getBackendName() const override { return "hosts"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Virtual in newer releases of c10d alone. NOLINTNEXTLINE(modernize-use-override)
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void abort() override { links_->abort(); }

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
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // Lists of tensors: hosts_lists.cpp.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  bool batches(int peer) const override { return links_->is_near(peer); }
  bool signs_uneven() const override { return true; }
  WorkPtr all_gather_v(const at::Tensor& output, const at::Tensor& input, const Counts& sizes,
                       CallLimit limit) override;
  WorkPtr reduce_scatter_v(const at::Tensor& output, const at::Tensor& input, const Counts& sizes,
                           const c10d::ReduceOp& op, CallLimit limit) override;
  WorkPtr gather_v(const at::Tensor& output, const at::Tensor& input, const Counts& sizes, int root,
                   CallLimit limit) override;
  WorkPtr scatter_v(const at::Tensor& output, const at::Tensor& input, const Counts& sizes,
                    int root, CallLimit limit) override;
  /// Of messages to and from ranks of this host.
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override;
  bool moves(c10::ScalarType dtype) const override { return every_library_moves(dtype); }
  void sign(std::uint64_t call) override { signature_ = call; }

 private:
  using Body = std::function<void(HostLinks&, HostCall&)>;

  WorkPtr post(c10d::OpType type, std::chrono::milliseconds limit, Tensors results, Body body);
  WorkPtr all_gather_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                            std::chrono::milliseconds limit, Tensors results, Body after = {});
  WorkPtr reduce_scatter_counts(const at::Tensor& output, const at::Tensor& input, Counts counts,
                                const c10d::ReduceOp& op, std::chrono::milliseconds limit,
                                Tensors results);
  WorkPtr gather_counts(const at::Tensor& output, const at::Tensor& input, Counts counts, int root,
                        std::chrono::milliseconds limit, Tensors results, Body after = {});
  WorkPtr scatter_counts(const at::Tensor& output, const at::Tensor& input, Counts counts, int root,
                         std::chrono::milliseconds limit);
  void require_rank(int rank, const char* what) const;
  void require_sizes(const Counts& sizes, const char* name) const;
  int ranks() const { return size_; }

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_;
  const bool tells_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> sequence_{0};
  /// The signature of the next collective, as the group announced it.
  std::uint64_t signature_ = 0;
};

}  // namespace tessera::detail
