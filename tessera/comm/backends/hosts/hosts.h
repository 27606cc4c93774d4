#pragma once
// The backend that fits where a group's ranks are: found out when the group is made, by all ranks
// alike.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}

namespace tessera {

namespace detail {
class GroupWatch;
}

struct HostsOptions {
  /// Name of the group, for messages.
  std::string name;
  /// Limit of the making, and of calls that give none.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Global ranks in group order.
  std::vector<int> ranks;
  std::shared_ptr<detail::GroupWatch> watch;
  /// Numeric address of this host that listeners bind.
  std::string address;
  /// What this rank says of its host; empty: the kernel's boot, the network namespace and the user.
  /// Ranks of equal texts try to share memory, which succeeds where they can alone.
  std::string host;
};

struct ChosenBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  /// "shm": all ranks share memory. "gloo": no two do. "hosts": some do; collectives go through
  /// memory inside a host, and over Gloo between the first ranks of the hosts.
  std::string name;
  /// Why, in words: what all ranks found out.
  std::string reason;
};

/// Collective over the group's ranks. They meet at `store`, which belongs to this group alone; each
/// reads two short texts of each other one. Ranks of a host that fail to share memory (too little
/// memory, a forbidden call) are taken for ranks of hosts of their own, which the reason says.
///
/// Throws what the backends throw whose ranks do not come.
ChosenBackend make_backend_by_host(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const HostsOptions& options);

}  // namespace tessera
