#pragma once
// Groups whose ranks share a host, over tessera/shm.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/shm/meeting.h"

namespace c10d {
class Backend;
}

namespace tessera {

namespace detail {
class GroupWatch;
}

struct ShmBackendOptions {
  /// Of the group, for messages.
  std::string name = "shm";
  /// Of calls that give none, and of the meeting.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Global ranks in group order, for errors; empty: 0, 1, ...
  std::vector<int> ranks;
  /// What the group knows of faults; null: the backend tells the other ranks itself.
  std::shared_ptr<detail::GroupWatch> watch;
};

/// Meets the other ranks, whose processes must be on this host and of this user. Each leaves a few
/// short words in `store`, which belongs to this group alone; that the ranks share a host is proven
/// by meeting in memory, never by a name. Costs some milliseconds, 2 descriptors, one a peer, and
/// about 1 MiB of shared memory a rank (some more with many ranks), which belongs to no file and
/// goes when the last process has ended. A thread that moves started calls on begins with the first
/// of them.
///
/// Throws NotAvailable on every rank that came where they cannot share memory, and says why
/// (another host, another user, no memory, a forbidden system call). A rank that does not come is
/// what it is over any backend: TimeoutError, PeerLostError or CommError.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size,
                                                   const ShmBackendOptions& options);
/// The same where the ranks meet at something else than a store.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const shm::Directory& directory, int rank,
                                                   int size, const ShmBackendOptions& options);

}  // namespace tessera
