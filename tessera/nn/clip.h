#pragma once
// clip_gradients: one norm over parameters of every kind, each element counted once.
//
//   clip_gradients(net->parameters(), manager.world(), {.max_norm = 1.0});
//   // a table of which each rank holds some rows as a plain tensor:
//   clip_gradients(net->parameters(), manager.world(), {.max_norm = 1.0},
//                  {{table, manager.world()}});

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

struct ClipOptions {
  /// The largest norm, above 0; gradients are scaled where theirs is larger. Infinite: the norm is
  /// only measured.
  double max_norm = std::numeric_limits<double>::infinity();
  /// The order of the norm: at least 1, or infinity for the largest magnitude.
  double norm_type = 2;
  /// The ranks that hold other parameters of the same model (the stages of a pipeline): their norms
  /// are added. All its ranks call.
  std::optional<Group> disjoint = {};
  /// Those of the parameters that are scaled and not counted: another rank of `disjoint` holds and
  /// counts the same ones (Pipeline::repeated_parameters).
  std::vector<at::Tensor> elsewhere = {};
};

/// A plain parameter of which each rank of `group` holds another shard.
struct OwnedShard {
  at::Tensor parameter;
  Group group;
};

/// Scales the gradients of `parameters` by min(1, max_norm / norm) and returns the norm before
/// that, the same number on every rank.
///
/// Plain parameters count once: they are replicated (as under DistributedDataParallel), unless
/// `by_hand` says that each rank holds a shard. Sharded parameters count each element once, on
/// whatever mesh; several meshes may be mixed. Parameters without a gradient count as
/// zero. Collective over `group`, the ranks that train together, which all give the same
/// parameters in the same order: one all-reduce of one double for each combination of mesh and
/// sharded axes, and one of two doubles that compares the ranks' norms.
///
/// Throws InvalidArgument for a max_norm or norm_type outside their range, or a parameter of
/// `by_hand` that is not among `parameters` or is sharded; ShardingError for a gradient whose
/// placements are not its parameter's (still a Partial sum, as within no_sync()); MismatchError on
/// every rank of `group` if the norms differ between ranks by more than round-off (1e-5 relative):
/// a shard that was not declared, or replicas that have drifted apart. Nothing has been scaled
/// then. Where a gradient is NaN or infinite on any rank, every rank gets infinity, and nothing is
/// scaled.
double clip_gradients(const std::vector<at::Tensor>& parameters, const Group& group,
                      const ClipOptions& options = {}, const std::vector<OwnedShard>& by_hand = {});

}  // namespace tessera
