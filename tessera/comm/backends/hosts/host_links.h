#pragma once
// HostLinks: the ways between the ranks of a group over several hosts, and each collective as steps
// on them: in memory between the ranks of a host, over another transport between the hosts'
// leaders.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/backends/hosts/host_map.h"
#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

/// One collective, and what its steps share. Tensors are one-dimensional, contiguous, and on the
/// CPU; those that are only moved are of uint8. `timeout` is the limit of each step.
struct HostCall : TransportCall {
  /// Numbers of steps so far, inside the host and between hosts.
  std::uint64_t near = 0, far = 0;
};

/// Called by one thread. Outputs and inputs are those of TransportCall.
class HostLinks {
 public:
  using Counts = HostCall::Counts;
  using TransportPtr = std::shared_ptr<Transport>;

  /// `near`: memory, over the ranks of this host in ascending order; null if there is one. `wide`:
  /// over all ranks, for messages. `leaders`: over the hosts' leaders, in the order of the hosts;
  /// null on other ranks.
  HostLinks(HostMap map, int rank, TransportPtr near, TransportPtr wide, TransportPtr leaders);

  const HostMap& map() const { return map_; }
  /// True if messages with this rank of the group go through memory.
  bool is_near(int rank) const { return map_.host_of[index(rank)] == host_; }
  Transport& wide() const { return *wide_; }
  /// Null if this rank is alone on its host.
  Transport* near() const { return near_.get(); }

  /// Ends the calls of all links, here. From any thread.
  void abort();
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  void barrier(HostCall& call);
  void broadcast(HostCall& call);
  void all_reduce(HostCall& call);
  void reduce(HostCall& call);
  void reduce_scatter(HostCall& call);
  void all_gather(HostCall& call);
  void gather(HostCall& call);
  void scatter(HostCall& call);
  /// Counts are this rank's own. Throws FinalMismatch if a rank sends what its receiver does not
  /// wait for; then no data has moved between these two.
  void all_to_all(HostCall& call);

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  const std::vector<int>& mates() const { return map_.hosts[index(host_)]; }
  bool leads() const { return place_ == 0; }
  /// Sums of counts over the ranks of each host.
  Counts per_host(const Counts& counts) const;
  /// The counts of this host's ranks.
  Counts of_mates(const Counts& counts) const;
  /// Copies from the order of the group to that of the hosts, or back.
  enum class Order : unsigned char { of_hosts, of_group };
  void copy_to(Order order, const at::Tensor& to, const at::Tensor& from,
               const Counts& counts) const;

  /// One step over the ranks of this host, done on return; nothing if this rank is alone there.
  void near_step(HostCall& call, TransportCall step, Transport::Function make);
  /// One step over the leaders.
  void far_step(HostCall& call, TransportCall step, Transport::Function make);
  void near_broadcast(HostCall& call, const at::Tensor& data, int place);
  /// The leader gets the result, in place there.
  void near_reduce(HostCall& call, const at::Tensor& data);
  /// A gather to the leader or a scatter from it, `make`: the whole is used there alone.
  void near_rooted(HostCall& call, Transport::Function make, const at::Tensor& output,
                   const at::Tensor& input, const Counts& counts);
  void far_all_to_all(HostCall& call, const at::Tensor& output, const Counts& output_counts,
                      const at::Tensor& input, const Counts& input_counts);
  /// The counts that each rank of this host gave: a row per rank, what it sends and what it waits
  /// for.
  std::vector<Counts> near_counts(HostCall& call);
  /// Compares what this host's ranks wait for with what ranks of other hosts send them.
  void compare_far_counts(HostCall& call, const std::vector<Counts>& rows);
  void all_to_all_far(HostCall& call, const std::vector<Counts>& rows);
  /// What other hosts send to this one, by receiver, for what all its ranks send to them
  /// (`gathered`: by sender, so many bytes of each).
  at::Tensor exchange_far(HostCall& call, const std::vector<Counts>& rows,
                          const at::Tensor& gathered, const Counts& sent, const Counts& awaited);
  /// The ranks of other hosts, in the order of the hosts.
  std::vector<std::size_t> far_ranks() const;

  const HostMap map_;
  const int rank_, host_, place_;
  const TransportPtr near_, wide_, leaders_;
  std::atomic<bool> aborted_{false};
};

/// A group over several hosts, of whose ranks some share one. Collectives go through memory inside
/// a host and over another transport between the hosts' leaders; a message goes through memory if
/// its ends share a host, and over the other transport otherwise. `tells`: a call that fails here
/// ends the calls of the other ranks; for groups without a watch.
std::shared_ptr<Transport> make_hosts_transport(std::shared_ptr<HostLinks> links, int rank,
                                                std::chrono::milliseconds timeout, bool tells);

}  // namespace tessera::detail
