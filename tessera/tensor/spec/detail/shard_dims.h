#pragma once
// How placements and sizes shard the dims of a tensor: the checks behind ShardSpec, also for ranks
// outside the mesh.

#include <cstdint>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Throws InvalidArgument if there are fewer or more placements than axes.
void require_one_per_axis(const Mesh& mesh, const std::vector<Placement>& placements);

/// The size of each axis.
std::vector<int> axis_sizes(const Mesh& mesh);

/// Makes negative dims of `placements` non-negative, and returns the partitions of the dims. Throws
/// what ShardSpec's constructor does.
std::vector<DimSharding> shard_dims(const Mesh& mesh, const std::vector<std::int64_t>& shape,
                                    std::vector<Placement>& placements, const ShardSizes& sizes);

}  // namespace tessera::detail
