#pragma once
// What the copies of a GhostPlan share, and its two directions below autograd.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/comm/group/types.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/halo/detail/peer_exchange.h"
#include "tessera/partition/ghosts.h"
#include "tessera/partition/internal/ghost_directory.h"

namespace tessera {
struct GhostTransport;
}  // namespace tessera

namespace tessera::detail {

/// A transport of the user's, and the ids with which it is checked.
struct UserExchange;

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
  /// In the place of these messages, where there is one.
  std::shared_ptr<const UserExchange> by_user = nullptr;

  Group group() const { return mesh.group(axes); }
  bool travels() const { return !rows.sends.empty() || !rows.receives.empty(); }
};

/// ghost_exchange() and ghost_reduce() on locals that fit: nothing is checked and nothing recorded.
at::Tensor rows_and_ghosts(const std::shared_ptr<GhostState>& state, const at::Tensor& owned);
at::Tensor reduced_to_owners(const std::shared_ptr<GhostState>& state, const at::Tensor& rows,
                             ReduceOp op);
/// True for the dtypes that ghosts are reduced in.
bool reduces_ghosts_of(at::ScalarType type);

/// One of the two directions by the user's functions, on owned rows and ghosts: what arrives stands
/// where ours would put it.
void run_by_user(const GhostState& state, bool forward, const at::Tensor& rows);
/// Throws InvalidArgument for a dtype that the user's functions do not carry.
void check_carried(const UserExchange& by_user, at::ScalarType type);

/// The numbers as a tensor that shares their memory, and those of a dense int64 tensor on the host.
at::Tensor tensor_over(const std::vector<std::int64_t>& numbers);
std::span<const std::int64_t> span_over(const at::Tensor& numbers);
/// Every axis of the mesh, by its index.
std::vector<int> all_axes(const DeviceMesh& mesh);
/// What the ranks of a group send each other, as it arrives. Collective.
IdsByRank carried_by(const Group& group, const IdsByRank& sent);
/// The messages of a plan whose rows are known, and the order of its ghosts.
void prepare_messages(GhostState& state);

}  // namespace tessera::detail
