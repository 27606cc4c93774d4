#pragma once
// HostsBackend: a group over several hosts, of whose ranks some share one. Collectives go through
// memory inside a host and over another backend between the hosts' leaders; a message goes through
// memory if its ends share a host, and over the other backend otherwise.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/hosts/host_links.h"
#include "tessera/comm/backends/hosts/hosts_work.h"
#include "tessera/comm/backends/own_backend.h"

namespace tessera::detail {

class HostsBackend final : public OwnBackend {
 public:
  /// `tells`: a call that fails here ends the calls of the other ranks; for groups without a watch.
  HostsBackend(std::shared_ptr<HostLinks> links, int rank, std::chrono::milliseconds timeout,
               bool tells);
  ~HostsBackend() override;

  const std::string getBackendName() const override { return "hosts"; }
  void abort() override { links_->abort(); }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  /// Throws NotAvailable where some ranks of the group share a host and others do not.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // Lists of tensors: hosts_lists.cpp.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  bool batches(int peer) const override { return links_->is_near(peer); }
  bool signs_uneven() const override { return true; }
  /// Of messages to and from ranks of this host.
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override;
  bool moves(c10::ScalarType dtype) const override { return every_library_moves(dtype); }

 private:
  using Body = std::function<void(HostLinks&, HostCall&)>;

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

  WorkPtr post(OwnCall how, Body body);
  WorkPtr all_reduce_all(const Tensors& tensors, const c10d::ReduceOp& op, OwnCall how);

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_;
  const bool tells_;
};

}  // namespace tessera::detail
