#pragma once
// The transport that fits where a group's ranks are: found out when the group is made, by all ranks
// alike.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/shm/shm.h"

namespace tessera {

struct HostsOptions : ShmOptions {
  /// Numeric address of this host that listeners bind.
  std::string address = {};
  /// If given: asked for the address, by all ranks of a group over several hosts and by no other.
  std::function<std::string()> find_address = {};
  /// What this rank says of its host; empty: the kernel's boot, the network namespace and the user.
  /// Ranks of equal texts try to share memory, which succeeds where they can alone.
  std::string host = {};
  /// What collectives between hosts go over: "gloo"; "mpi", which throws NotAvailable on every rank
  /// if one of them cannot; "auto": MPI if all ranks can, else Gloo.
  std::string between = "auto";
  /// The job's ranks of MPI, whose numbers are the global ranks; nullopt: this rank has none. At a
  /// thread level of at least `serialized`, since a thread of the group makes the calls.
  std::optional<MpiWorld> mpi = {};
  /// Where no two ranks share memory: true gives Gloo as it is, for tessera::Group, which adds what
  /// Gloo lacks (averages, NaN, half precision rounded once); false gives "hosts",
  /// which does that by itself.
  bool plain = true;
};

struct ChosenTransport {
  std::shared_ptr<detail::Transport> transport;
  /// "shm": all ranks share memory. "gloo" or "mpi": no two do. "hosts": some do; collectives go
  /// through memory inside a host, and over Gloo or MPI between the first ranks of the hosts.
  std::string name;
  /// Why, in words: what all ranks found out.
  std::string reason;
  /// What kept ranks that seem to be of one host from sharing memory; empty: nothing did.
  std::string refused;
};

/// Which ranks it is worth to introduce to each other: boot, network namespace and user, a line
/// each.
std::string mark_of_host();

/// Collective over the group's ranks. They meet at `store`, which belongs to this group alone; each
/// reads two short texts of each other one. Ranks of a host that fail to share memory (too little
/// memory, a forbidden call) are taken for ranks of hosts of their own, which the reason says.
///
/// What goes between hosts follows from what the ranks have, never from a measurement: Gloo and MPI
/// add in different orders, so a choice by time would change the last bits from run to run.
///
/// Throws what the transports throw whose ranks do not come, and NotAvailable for `between` =
/// "mpi".
ChosenTransport make_transport_by_host(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, const HostsOptions& options);

}  // namespace tessera
