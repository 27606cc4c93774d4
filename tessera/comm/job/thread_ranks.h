#pragma once
// ThreadRanks: the ranks of run_threads() one by one, for threads that somebody else makes (an
// interpreter's, a solver's).
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
  /// As for run_threads(): backend "threads" (default), "gloo" or "shm". Throws InvalidArgument.
  explicit ThreadRanks(int ranks, const ManagerOptions& options = {});
  int size() const;
  /// This rank's manager. Called once a rank, on the rank's thread; the ranks meet in their first
  /// collective call. Until leave(), autocast on this thread keeps no casts: libtorch's cache of
  /// them is one for all threads.
  DistributedManager enter(int rank) const;
  /// The other ranks' pending and later calls throw PeerLostError with these words.
  void fail(int rank, const std::string& what) const;
  /// The rank is told of no fault any more. Call it on the rank's thread, before its last handle of
  /// the manager goes.
  void leave(int rank) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
