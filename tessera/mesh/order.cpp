#include "tessera/mesh/order.h"

#include <algorithm>
#include <set>

#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {

std::vector<std::string> split_order(const std::string& order) {
  std::vector<std::string> names = split(order, '-');
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name.empty())
      throw GroupConfigError("the order '", order,
                             "' has an empty name; write axis names with single dashes between");
    if (!seen.insert(name).second)
      throw RepeatedName("axis '", name, "' is duplicated in the order '", order, "'");
  }
  return names;
}

std::vector<Axis> axes_from_order(const std::string& order,
                                  const std::map<std::string, int>& sizes) {
  const auto names = split_order(order);
  for (const auto& [name, size] : sizes)
    if (std::ranges::find(names, name) == names.end())
      throw UnknownName("axis '", name, "' has size ", size, " but is not in the order '", order,
                        "'; add it there");
  std::vector<Axis> axes;
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    const auto size = sizes.find(*name);
    axes.push_back({*name, size == sizes.end() ? 1 : size->second});
  }
  return axes;
}

Mesh mesh_from_order(const std::string& order, const std::map<std::string, int>& sizes,
                     int world_size) {
  Mesh mesh(axes_from_order(order, sizes));
  if (world_size > 0 && mesh.size() != world_size)
    throw WorldSizeMismatch(concat("the sizes of ", mesh.to_string(), " multiply to ", mesh.size(),
                                   ", but the world has ", world_size,
                                   " ranks; change a size so that the product is ", world_size),
                            world_size, mesh.size());
  return mesh;
}

std::string order_of(const Mesh& mesh) {
  std::string order;
  for (auto axis = mesh.axes().rbegin(); axis != mesh.axes().rend(); ++axis) {
    if (axis->name.empty() || axis->name.find('-') != std::string::npos)
      throw GroupConfigError("axis '", axis->name,
                             "' cannot be used in a named order: a name must not be empty or "
                             "hold a dash; rename the axis");
    if (!order.empty()) order += '-';
    order += axis->name;
  }
  return order;
}

Mesh parallel_mesh(int world_size, int model_parallelism, int pipeline_parallelism) {
  if (world_size < 1 || model_parallelism < 1 || pipeline_parallelism < 1)
    throw GroupConfigError("world ", world_size, ", model parallelism ", model_parallelism,
                           " and pipeline parallelism ", pipeline_parallelism,
                           " must each be at least 1");
  const long long product = static_cast<long long>(model_parallelism) * pipeline_parallelism;
  if (world_size % product != 0)
    throw WorldSizeMismatch(
        concat("a world of ", world_size, " ranks does not divide by model parallelism ",
               model_parallelism, " x pipeline parallelism ", pipeline_parallelism, " = ", product,
               "; ", world_size % product, " ranks would be left over"),
        world_size, product);
  return Mesh({{"dp", static_cast<int>(world_size / product)},
               {"pp", pipeline_parallelism},
               {"mp", model_parallelism}});
}

}  // namespace tessera
