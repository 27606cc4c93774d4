#pragma once
// SavedLayout: how a tensor lay on the mesh that saved it, kept beside it in files, and restored on
// wish.
//
//   saved on data 2, domain 3:   [4, 7] Shard(0){3, 1}, Shard(1){4, 0, 3}
//   fit_layout on domain 3:      [4, 7] Shard(1){4, 0, 3}; misfits: "axis 'data', which sharded
//                                dim 0, is not in the mesh"

#include <string>
#include <vector>

#include "tessera/files/json.h"
#include "tessera/mesh/mesh.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

struct SavedLayout {
  /// The axes are those of the mesh that saved it, outermost first.
  std::vector<Axis> axes;
  /// One an axis; never Partial: what is saved has been reduced.
  std::vector<Placement> placements;
  ShardSizes sizes;
  bool operator==(const SavedLayout&) const = default;
};

SavedLayout saved_layout(const ShardSpec& spec);
/// Returns JSON: {"axes":[["data",2]],"placements":[0],"sizes":{"0":[3,1]}}; a placement is the dim
/// that is sharded, or null.
std::string to_json(const SavedLayout& layout);
/// Throws InvalidArgument for anything else.
SavedLayout layout_from_json(const Json& json);

/// The layout on `mesh`: each axis places the tensor as the axis of the same name did, axes that
/// the layout does not know replicate it. Where the axes that shard a dim have the sizes they had,
/// its shards have the saved sizes, else they are even. What does not fit is listed in `misfits`, a
/// sentence each; without it the first misfit throws InvalidArgument.
ShardSpec fit_layout(const SavedLayout& layout, const DeviceMesh& mesh,
                     const std::vector<std::int64_t>& shape,
                     std::vector<std::string>* misfits = nullptr);

}  // namespace tessera
