#pragma once
// How placements and sizes cut the dims of a tensor: the checks behind ShardSpec, for ranks outside
// the mesh too.

#include <cstdint>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Gives negative dims of `placements` their place. Throws what ShardSpec's constructor does.
std::vector<DimSharding> cut_dims(const Mesh& mesh, const std::vector<std::int64_t>& shape,
                                  std::vector<Placement>& placements, const ShardSizes& sizes);

}  // namespace tessera::detail
