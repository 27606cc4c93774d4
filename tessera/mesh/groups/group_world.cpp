// A tree in a world of so many ranks: open leaves get their sizes, and slots their ranks.

#include <algorithm>
#include <limits>

#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/groups/group_config.h"

namespace tessera {

namespace {

// Trees of more nodes are not drawn in a message.
constexpr std::size_t kDrawn = 40;

}  // namespace

bool ProcessGroupConfig::inside_a_world() const {
  if (root().name == "world") return false;
  if (!root().orthogonal_group.empty()) return true;
  return std::ranges::any_of(orthogonal_, [&](const OrthogonalGroup& group) {
    return group.of == std::vector{root().name};
  });
}

ProcessGroupConfig ProcessGroupConfig::inside_world(const std::string& replicas) const {
  if (root().name == "world")
    throw GroupConfigError(
        "the root is named 'world', so nothing is outside it; give the root the model's name");
  ProcessGroupConfig larger;
  OrthogonalGroup outside{root().orthogonal_group, {root().name}, root().scope, root().options};
  std::vector<OrthogonalGroup> others = orthogonal_;
  if (outside.name.empty()) {
    const auto first = std::ranges::find_if(
        others, [&](const OrthogonalGroup& group) { return group.of == std::vector{root().name}; });
    if (first == others.end()) {
      outside.name = replicas;
    } else {
      outside = *first;
      others.erase(first);
    }
  }
  if (!outside.scope.empty() && outside.scope != "parent" && outside.scope != "world")
    throw OrthogonalityError(
        concat("'", outside.name, "' is to be orthogonal to the root '", root().name,
               "' in the scope '", outside.scope,
               "', which does not hold it; the scope of a root inside a larger world is 'world'"),
        {});
  ProcessGroupNode model = root();
  model.orthogonal_group.clear();
  model.scope.clear();
  larger.add_node(std::move(model), "world");
  for (std::size_t i = 1; i < nodes_.size(); ++i)
    larger.add_node(nodes_[i].node, nodes_[nodes_[i].parent].node.name);
  larger.add_node({.name = outside.name, .options = outside.options}, "world");
  for (OrthogonalGroup& group : others) larger.add_orthogonal(std::move(group));
  return larger;
}

std::string ProcessGroupConfig::advice(int world_size, long long product) const {
  if (product >= world_size || world_size % product != 0) return "";
  const long long replicas = world_size / product;
  if (root().name == "world")
    return concat("; if these are ", replicas,
                  " replicas, add an open leaf for them, such as {name: data} below 'world'");
  const std::string start = concat("; if '", root().name, "' is a model of which the world holds ",
                                   replicas, " replicas, ");
  const auto groups = orthogonal_groups();
  const bool taken =
      contains("data_parallel") || std::ranges::any_of(groups, [](const OrthogonalGroup& group) {
        return group.name == "data_parallel";
      });
  if (taken || nodes_.size() > kDrawn)
    return start + "give its root an orthogonal_group, whose groups hold the replicas";
  return concat(start, "give its root `orthogonal_group: data_parallel`, which stands for\n",
                inside_world().resolve(world_size).to_string());
}

ProcessGroupConfig ProcessGroupConfig::resolve(int world_size) const {
  if (world_size < 1)
    throw GroupConfigError("a world of ", world_size, " ranks; it has at least 1");
  if (inside_a_world()) return inside_world().resolve(world_size);
  std::vector<std::string> open, given;
  long long product = 1;
  for (const auto& leaf : leaf_groups()) {
    if (const auto& size = node(leaf).size) {
      product *= *size;
      if (product > std::numeric_limits<int>::max())
        throw WorldSizeMismatch(
            concat("the leaf sizes multiply to more than ", std::numeric_limits<int>::max(),
                   ", but the world has ", world_size, " ranks"),
            world_size, product);
      given.push_back(concat(leaf, " = ", *size));
    } else {
      open.push_back(leaf);
    }
  }
  ProcessGroupConfig resolved = *this;
  if (open.size() > 1)
    throw UnsetSize("the leaf groups ", list(open),
                    " have no size; one may be left open and follows from the world of ",
                    world_size, " ranks, set the others");
  if (open.size() == 1) {
    if (world_size % product != 0)
      throw WorldSizeMismatch(
          concat("the size of '", open.front(), "' cannot follow from the world: ", world_size,
                 " ranks do not divide by the product ", product, " of ", list(given)),
          world_size, product);
    resolved.nodes_[find(open.front())].node.size = static_cast<int>(world_size / product);
  } else if (product != world_size) {
    throw WorldSizeMismatch(
        concat("the leaf sizes ", list(given), " multiply to ", product, ", but the world has ",
               world_size, " ranks", advice(world_size, product)),
        world_size, product);
  }
  const auto sizes = resolved.all_sizes();
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Item& item = nodes_[i];
    if (item.children.empty()) continue;
    const int actual = *sizes[i];
    if (item.node.size.value_or(actual) != actual)
      throw WorldSizeMismatch(
          concat("group '", item.node.name, "' says size ", *item.node.size, ", but its leaves ",
                 list(leaf_groups(item.node.name)), " multiply to ", actual),
          *item.node.size, actual);
    resolved.nodes_[i].node.size = actual;
  }
  return resolved;
}

Mesh ProcessGroupConfig::mesh(int world_size) const {
  const auto resolved = resolve(world_size);
  std::vector<Axis> axes;
  for (const auto& leaf : resolved.closeness())
    axes.insert(axes.begin(), {leaf, *resolved.node(leaf).size});
  return Mesh(std::move(axes));
}

Mesh ProcessGroupConfig::mesh(std::vector<int> ranks) const {
  auto axes = mesh(static_cast<int>(ranks.size())).axes();
  return Mesh(std::move(axes), std::move(ranks));
}

}  // namespace tessera
