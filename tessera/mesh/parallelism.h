#pragma once
// The rank lists of model x pipeline x data parallelism given by two sizes: ranks of one model are
// adjacent, pipeline stages stride over them, and data-parallel replicas stride over both.
//
//   parallel_mesh(8, 2, 2) on 8 ranks:
//     model [0,1] [2,3] [4,5] [6,7];  pipeline [0,2] [1,3] [4,6] [5,7];
//     data [0,4] [1,5] [2,6] [3,7]

#include "tessera/mesh/mesh.h"

namespace tessera {

/// The mesh dp x pp x mp, outermost first. Throws WorldSizeMismatch if model x pipeline does not
/// divide the world, GroupConfigError for a size below 1.
Mesh parallel_mesh(int world_size, int model_parallelism, int pipeline_parallelism);

}  // namespace tessera
