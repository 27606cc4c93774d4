#pragma once
// Ranks as threads of one process: for unit tests, debugging, and property tests over many meshes.

#include <functional>

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

}  // namespace tessera
