#pragma once
// A transport for groups whose ranks share a host, over tessera/shm.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/shm/group.h"

namespace tessera {

namespace detail {
class GroupWatch;
class Transport;
}  // namespace detail

struct ShmOptions {
  /// Name of the group, for messages.
  std::string name = "shm";
  /// Time limit of calls that give none, and of the meeting.
  std::chrono::milliseconds timeout = kDefaultLimit;
  /// Global ranks in group order, for errors; empty: 0, 1, ...
  std::vector<int> ranks = {};
  /// What the group knows of faults; null: the backend itself tells the other ranks.
  std::shared_ptr<detail::GroupWatch> watch = {};
};

/// The ranks meet at `store`, which belongs to their group alone.
shm::Directory directory_at(const c10::intrusive_ptr<c10d::Store>& store);

/// Meets the other ranks, whose processes must be on this host and of this user. Each writes a few
/// short texts to `store`, which belongs to this group alone; that the ranks share a host is proven
/// by meeting in memory, never by a name. Costs some milliseconds, 2 descriptors and one more per
/// peer, and about 1 MiB of shared memory per rank (somewhat more with many ranks), which belongs
/// to no file and is freed when the last process has ended. A thread that continues started calls
/// begins with the first of them.
///
/// Throws NotAvailable on every rank that came if they cannot share memory, with the reason
/// (another host, another user, no memory, a forbidden system call). If a rank does not come,
/// throws what any transport throws: TimeoutError, PeerLostError or CommError.
std::shared_ptr<detail::Transport> make_shm_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      const ShmOptions& options);
/// The ranks meet through something other than a store.
std::shared_ptr<detail::Transport> make_shm_transport(const shm::Directory& directory, int rank,
                                                      int size, const ShmOptions& options);

}  // namespace tessera
