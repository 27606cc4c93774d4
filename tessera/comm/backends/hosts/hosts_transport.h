#pragma once
// HostsTransport: a group over several hosts, of whose ranks some share one. Collectives go through
// memory inside a host and over another transport between the hosts' leaders; a message goes
// through memory if its ends share a host, and over the other transport otherwise.

#include <chrono>
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
  void broadcast(TransportCall& call) override { move(call, &HostLinks::broadcast); }
  void all_reduce(TransportCall& call) override { post(call, &HostLinks::all_reduce); }
  void reduce(TransportCall& call) override { post(call, &HostLinks::reduce); }
  void all_gather(TransportCall& call) override { move(call, &HostLinks::all_gather); }
  void reduce_scatter(TransportCall& call) override { post(call, &HostLinks::reduce_scatter); }
  void gather(TransportCall& call) override { move(call, &HostLinks::gather); }
  void scatter(TransportCall& call) override { move(call, &HostLinks::scatter); }
  void all_to_all(TransportCall& call) override { move(call, &HostLinks::all_to_all); }
  /// Throws NotAvailable for a receive from any rank where some ranks of the group share a host and
  /// others do not.
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override { post(call, &HostLinks::barrier); }
  void abort() override { links_->abort(); }
  bool batches(int peer) const override { return links_->is_near(peer); }

 private:
  using Function = void (HostLinks::*)(HostCall&);
  /// Has the worker do a call that reduces, or moves nothing.
  void post(TransportCall& call, Function function);
  /// This is post() of a call that moves bytes.
  void move(TransportCall& call, Function function);
  void post(TransportCall& given, HostCall call, Function function);

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_;
  const bool tells_;
};

}  // namespace tessera::detail
