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

  Abilities abilities() override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  /// Throws NotAvailable where some ranks of the group share a host and others do not.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  bool batches(int peer) const override { return links_->is_near(peer); }
  /// Of messages to and from ranks of this host.
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

 private:
  using Body = std::function<void(HostLinks&, HostCall&)>;

  WorkPtr broadcast_one(OwnCall call) override;
  WorkPtr all_reduce_one(OwnCall call) override;
  WorkPtr reduce_one(OwnCall call) override;
  WorkPtr all_gather_counts(OwnCall call) override;
  WorkPtr reduce_scatter_counts(OwnCall call) override;
  WorkPtr gather_counts(OwnCall call) override;
  WorkPtr scatter_counts(OwnCall call) override;
  WorkPtr all_to_all_counts(OwnCall call) override;
  WorkPtr all_to_all_each(const Tensors& inputs, OwnCall call) override;

  WorkPtr post(OwnCall& how, Body body);

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_;
  const bool tells_;
};

}  // namespace tessera::detail
