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

}  // namespace tessera
