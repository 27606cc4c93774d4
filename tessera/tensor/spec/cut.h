#pragma once
// How placements and sizes cut the dims of a tensor: the checks behind ShardSpec, for ranks outside
// the mesh too.

#include <cstdint>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Throws InvalidArgument if there are fewer or more placements than axes.
void require_one_an_axis(const Mesh& mesh, const std::vector<Placement>& placements);

/// Gives negative dims of `placements` their place. Throws InvalidArgument if there is not one
/// placement an axis, or one that a tensor of this shape cannot have.
void normalize(const Mesh& mesh, const std::vector<std::int64_t>& shape,
               std::vector<Placement>& placements);

/// normalize(), and the partitions of the dims. Throws what ShardSpec's constructor does.
std::vector<DimSharding> cut_dims(const Mesh& mesh, const std::vector<std::int64_t>& shape,
                                  std::vector<Placement>& placements, const ShardSizes& sizes);

}  // namespace tessera::detail
