#pragma once
// Named orders: in "tp-cp-ep-dp-pp" the first axis has adjacent ranks. A mesh is written the other
// way round, outermost first; these functions convert between the two.
//
//   mesh_from_order("tp-cp-dp", {{"tp", 2}, {"dp", 4}})   ->  Mesh dp=4 x cp=1 x tp=2
//   order_of(mesh)                                        ->  "tp-cp-dp"

#include <map>
#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

/// Splits an order: "tp-pp" -> {"tp", "pp"}. Throws GroupConfigError for an empty name and
/// RepeatedName for a duplicate one.
std::vector<std::string> split_order(const std::string& order);

/// The axes of the order, outermost first; an axis without a size has size 1. Throws UnknownName
/// for a size whose axis is not in the order.
std::vector<Axis> axes_from_order(const std::string& order,
                                  const std::map<std::string, int>& sizes);

/// The row-major mesh of those axes. With `world_size` above 0 the product must be the world;
/// throws WorldSizeMismatch otherwise.
Mesh mesh_from_order(const std::string& order, const std::map<std::string, int>& sizes,
                     int world_size = 0);

/// The axes' names, innermost (adjacent ranks) first. Throws GroupConfigError if a name holds a
/// dash or is empty, for then the order cannot be read back.
std::string order_of(const Mesh& mesh);

/// The mesh dp x pp x mp, outermost first: ranks of one model are adjacent, pipeline stages stride
/// over them, and data-parallel replicas stride over both. parallel_mesh(8, 2, 2) on 8 ranks:
///   model [0,1] [2,3] [4,5] [6,7];  pipeline [0,2] [1,3] [4,6] [5,7];
///   data [0,4] [1,5] [2,6] [3,7]
/// Throws WorldSizeMismatch if model x pipeline does not divide the world, GroupConfigError for a
/// size below 1.
Mesh parallel_mesh(int world_size, int model_parallelism, int pipeline_parallelism);

}  // namespace tessera
