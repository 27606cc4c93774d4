#pragma once
// For programs that have process groups or a store of c10d's already: a manager over their ranks.
//
//   c10::intrusive_ptr<c10d::ProcessGroup> group = ...;  // PyTorch's, or another framework's
//   auto manager = manager_of({.group = group});          // collective over the group
//   auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
//   // backends of the program's own, by name: each group of an axis that asks for one
//   auto other = manager_of(
//       {.store = store, .rank = 1, .size = 4, .backends = {{"mine", make_mine}}},
//       {.backend = "mine"});

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <string>

#include "tessera/comm/job/manager.h"

namespace tessera {

/// Makes a backend of c10d's for CPU tensors of `size` ranks, of which this one is `rank`. They
/// meet at `store`, which is theirs alone, within `limit`. Called by each member of a group.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds limit)>;

/// What the program has: a process group, or a store with a rank and the number of ranks.
struct C10dRanks {
  /// Its ranks, in its order, are the world. It stays the program's: it is not ended here.
  c10::intrusive_ptr<c10d::ProcessGroup> group = {};
  /// Where the ranks meet. Null: the group's own store. Its keys that begin with "tessera/" are
  /// written; it must outlive the call alone.
  c10::intrusive_ptr<c10d::Store> store = {};
  /// They are needed without a group. `size` 0: not given.
  int rank = 0, size = 0;
  /// Rank 0 listens on it where ranks are on several hosts. Empty: its host's name.
  std::string address = {};
  /// Backends that ManagerOptions::backend, GroupOptions::backend and the axes of a configuration
  /// may name beside the library's.
  std::map<std::string, MakeBackend> backends = {};
};

/// Makes a manager whose world are these ranks; collective over them. They meet through the store
/// alone: no launcher's environment is read, and rank 0 opens a port of its own. Groups go over
/// ManagerOptions::backend as ever, "auto" by default. "c10d" is the given group itself, for groups
/// of all its ranks in its order, on the devices that it has backends for: the program then makes
/// no call on it while one of the library's is in progress, and calls that differ between ranks end
/// as they do on c10d. May be called several times for one group or store, in the same order on all
/// ranks. Throws InvalidArgument (neither group nor store, or what contradicts them; a launch, MPI
/// or an unknown backend in `options`), RendezvousError.
DistributedManager manager_of(const C10dRanks& ranks, const ManagerOptions& options = {});

}  // namespace tessera
