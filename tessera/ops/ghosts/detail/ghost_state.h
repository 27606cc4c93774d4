#pragma once
// What the copies of a GhostPlan share.

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/halo/detail/peer_exchange.h"
#include "tessera/partition/ghosts.h"

namespace tessera::detail {

struct GhostState {
  DeviceMesh mesh;
  std::vector<int> axes;
  GhostRows rows = {};
  /// The same on all ranks; another partition has another one.
  std::uint64_t number = 0;
  /// The ghosts stand in the order in which they arrive: by owner, in ascending order.
  bool in_order = true;
  /// One piece for each peer, in rows.
  std::shared_ptr<PeerExchange> peers = nullptr;

  Group group() const { return mesh.group(axes); }
  bool travels() const { return !rows.sends.empty() || !rows.receives.empty(); }
};

}  // namespace tessera::detail
