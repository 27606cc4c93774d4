#pragma once
// HostsTransport: a group over several hosts, of whose ranks some share one. Collectives go through
// memory inside a host and over another transport between the hosts' leaders; a message goes
// through memory if its ends share a host, and over the other transport otherwise.

#include <chrono>
#include <functional>
#include <memory>

#include "tessera/comm/backends/hosts/host_links.h"
#include "tessera/comm/backends/hosts/hosts_work.h"
#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

class HostsTransport final : public Transport {
 public:
  /// `tells`: a call that fails here ends the calls of the other ranks; for groups without a watch.
  HostsTransport(std::shared_ptr<HostLinks> links, int rank, std::chrono::milliseconds timeout,
                 bool tells);
  ~HostsTransport() override { worker_->close(links_->aborted()); }

  const char* name() const override { return "hosts"; }
  Abilities abilities() override;
  void broadcast(TransportCall& call) override;
  void all_reduce(TransportCall& call) override;
  void reduce(TransportCall& call) override;
  void all_gather(TransportCall& call) override;
  void reduce_scatter(TransportCall& call) override;
  void gather(TransportCall& call) override;
  void scatter(TransportCall& call) override;
  void all_to_all(TransportCall& call) override;
  /// Throws NotAvailable for a receive from any rank where some ranks of the group share a host and
  /// others do not.
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override;
  void abort() override { links_->abort(); }
  bool batches(int peer) const override { return links_->is_near(peer); }

 private:
  void post(TransportCall& call, std::function<void(HostLinks&, HostCall&)> body);

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_;
  const bool tells_;
};

}  // namespace tessera::detail
