#pragma once
// Launch: who this process is, as its launcher says.

#include <string>
#include <vector>

namespace tessera {

/// Rank, world and rendezvous of one process. Unequal ranks per node are normal.
struct Launch {
  std::string launcher = "single";   ///< "code", "tessera", "torchrun", "open_mpi", "pmi", "jsm", "slurm", "plain", "single".
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  int node_rank = 0;
  std::vector<std::string> hosts;    ///< In node order, where the launcher says; else empty.
  std::string address;               ///< Of the rendezvous store; empty for a single process.
  int port = 0;
  bool agent_serves_store = false;   ///< torchrun's agent already listens on address:port.
};

}  // namespace tessera
