#pragma once
// RankState: what belongs to a rank rather than to a mesh, shared by all meshes of one manager.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "tessera/tensor/halo_policy.h"
#include "tessera/tensor/policy.h"

namespace tessera::detail {

struct RankState {
  std::mutex mutex;
  // The generator of sharded tensors: a seed and the stream of the next draw, alike on all ranks.
  std::uint64_t seed = 0x7e55e7a;
  std::uint64_t stream = 0;
  Policies policies;
  std::atomic<HaloPolicy> halo_policy = HaloPolicy{};
  std::set<std::string> warned;  // what was warned about once
};

}  // namespace tessera::detail
