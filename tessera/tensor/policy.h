#pragma once
// Policies: what happens where an operator would do more than its user wrote.

#include "tessera/comm/job/manager.h"

namespace tessera {

/// `warn`: once for each operator, combination of placements, and place in the program that calls
/// it.
enum class Policy : unsigned char { allow, warn, error };

struct Policies {
  /// An operator that gathers or moves shards between ranks by itself. (Reducing a partial value is
  /// what the placement asks for, and is not meant.)
  Policy redistribution = Policy::warn;
  /// A plain tensor that meets sharded ones and is taken as replicated.
  Policy promotion = Policy::allow;
};

/// Of this manager's tensors. All ranks must set the same.
void set_policies(const DistributedManager& manager, const Policies& policies);
Policies policies(const DistributedManager& manager);

/// Restarts the random numbers of this manager's sharded tensors. All ranks must give the same
/// seed.
void manual_seed(const DistributedManager& manager, std::uint64_t seed);

}  // namespace tessera
