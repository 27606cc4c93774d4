#pragma once
// Ranks of MPI on several hosts, which on_hosts.h makes of one machine.

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "mpi_support.h"
#include "on_hosts.h"

namespace tessera::test {

/// The launch of a job that has a store as well: rank 0 tells the others over MPI where it is.
inline Launch launch_with_store(const MpiWorld& world) {
  std::vector<at::Tensor> port{at::full({1}, 0, at::kLong)};
  if (world.rank() == 0) port[0].fill_(testing::free_port());
  backend(world, all_ranks(world), "port")->broadcast(port)->wait();
  return testing::local_launch(world.rank(), world.size(), port[0].item<int>());
}

}  // namespace tessera::test
