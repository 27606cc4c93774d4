#pragma once
// ShmTransport: a group's calls through memory that its ranks share.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/shm/shm_work.h"
#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout)
      : Transport(link->rank(), link->size(), timeout), link_(std::move(link)) {}
  ~ShmTransport() override { link_->close(); }

  const char* name() const override { return "shm"; }
  Abilities abilities() override;
  /// How calls travel, and why, for reports.
  std::string describe() const { return shm::to_string(link_->group().describe()); }

  void broadcast(TransportCall& call) override;
  void all_reduce(TransportCall& call) override;
  void reduce(TransportCall& call) override;
  void all_gather(TransportCall& call) override;
  void reduce_scatter(TransportCall& call) override;
  void gather(TransportCall& call) override;
  void scatter(TransportCall& call) override;
  void all_to_all(TransportCall& call) override;
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override;
  void abort() override { link_->abort(); }
  /// Waits for calls in progress; later calls fail. The other ranks continue without this one.
  void shutdown() override {
    link_->close();
    link_->group().interrupt("it was shut down");
  }

 private:
  /// Makes one call: `make(calls, options)` on the calls that block or on those that are started.
  template <class Make>
  void run(TransportCall& call, std::uint64_t sign, const Make& make);
  /// Adds the work of what `make(requests, options)` starts.
  template <class Make>
  void start(TransportCall& call, std::uint64_t sign, const Make& make);
  std::shared_ptr<shm::Arena> share(std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                                    std::chrono::milliseconds limit);
  shm::Group& group() { return link_->group(); }

  const std::shared_ptr<ShmLink> link_;
};

}  // namespace tessera::detail
