#pragma once
// MpiAttempt: one of several tries of a manager to make a group over MPI.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/backends/mpi/mpi.h"

namespace tessera::detail {

struct MpiAttempt {
  /// Ranks of equal numbers meet; what a try that was given up has left is not taken for a message
  /// of another one. The same on all ranks.
  std::uint64_t number = 0;
  /// Asked while the ranks meet: true ends the wait with a PeerLostError. May be empty.
  std::function<bool()> given_up;
};

class Transport;

/// This is what tessera::make_mpi_backend() calls.
std::shared_ptr<Transport> make_mpi_transport(const MpiWorld& world, const std::vector<int>& ranks,
                                              const MpiBackendOptions& options,
                                              const MpiAttempt& attempt);

}  // namespace tessera::detail
