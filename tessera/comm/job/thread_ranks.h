#pragma once
// ThreadRanks: the ranks of run_threads() one by one, for threads that another program makes (an
// interpreter, a solver).
//
//   ThreadRanks ranks(2);
//   // on a thread of its own for each rank:
//   DistributedManager manager = ranks.enter(rank);
//   try { ... } catch (const std::exception& e) { ranks.fail(rank, e.what()); }
//   ranks.leave(rank);

#include <memory>
#include <string>

#include "tessera/comm/job/manager.h"

namespace tessera {

class ThreadRanks {
 public:
  /// Backends as for run_threads(): "threads" (default), "gloo", "shm" or "auto". Throws
  /// InvalidArgument.
  explicit ThreadRanks(int ranks, const ManagerOptions& options = {});
  int size() const;
  /// This rank's manager. Called once per rank, on the rank's thread; the ranks meet in their first
  /// collective call. Until leave(), autocast on this thread caches no casts: libtorch has one such
  /// cache for all threads.
  DistributedManager enter(int rank) const;
  /// Makes the other ranks' pending and later calls throw PeerLostError with `what`.
  void fail(int rank, const std::string& what) const;
  /// Ends the rank: it receives no fault notifications afterwards. Call it on the rank's thread,
  /// before its last handle of the manager is destroyed.
  void leave(int rank) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
