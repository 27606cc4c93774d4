#pragma once
// Ranks as threads of one process: for unit tests, debugging, and property tests over many meshes.

#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/job/manager.h"

namespace tessera {

/// Runs `body` on `ranks` threads (rank 0 on the caller's), each with a manager of its own over the
/// backend "threads" (or options.backend: "gloo", "shm", "auto"), and returns when all have ended.
/// A rank that throws, or that returns while others wait for it, makes the others' pending and
/// later calls throw PeerLostError; the first exception (by time) is rethrown here, with the rank
/// in its message if it is a tessera::Error. Throws Error, before any rank begins, if the system
/// has too few threads. CPU tensors only: on CUDA one autograd thread per device serves the
/// process, so that ranks as threads would deadlock in backward.
void run_threads(int ranks, const std::function<void(DistributedManager&)>& body,
                 const ManagerOptions& options = {});

/// The ranks of run_threads() one by one, for threads that another program makes (an interpreter,
/// a solver).
///
///   ThreadRanks ranks(2);
///   // on a thread of its own for each rank:
///   DistributedManager manager = ranks.enter(rank);
///   try { ... } catch (const std::exception& e) { ranks.fail(rank, e.what()); }
///   ranks.leave(rank);
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
