#include "tessera/mesh/groups/group_config.h"

#include <algorithm>
#include <limits>

#include "tessera/base/internal/name.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/order.h"

namespace tessera {
namespace {

constexpr const char* kFirst = "first-adjacent";
constexpr const char* kLast = "last-adjacent";

std::string options_text(const GroupOptions& options) {
  std::string text;
  if (!options.backend.empty()) text += concat(", backend ", options.backend);
  if (options.timeout) text += concat(", timeout ", options.timeout->count(), " ms");
  return text;
}

// Deeper trees are a mistake, and their drawings take megabytes.
constexpr int kDeepest = 4000;

void check_name(const std::string& name, const char* what) {
  if (name.empty()) throw GroupConfigError("a ", what, " has an empty name; give it one");
  if (const auto fault = name_fault(name, /*spaces=*/true))
    throw GroupConfigError("the name '", printable(name), "' of a ", what, " ", *fault,
                           "; choose another name");
  if (name == "parent")
    throw GroupConfigError("a ", what,
                           " is named 'parent', which is reserved for scopes; choose another name");
}

void check_size(const std::string& name, int size) {
  if (size < 1)
    throw GroupConfigError("group '", name, "' has size ", size, "; a size is at least 1");
}

}  // namespace

ProcessGroupConfig::ProcessGroupConfig(ProcessGroupNode root) {
  check_name(root.name, "root node");
  if (root.size) check_size(root.name, *root.size);
  index_.emplace(root.name, 0);
  nodes_.push_back({std::move(root), -1, {}, 1});
}

ProcessGroupConfig ProcessGroupConfig::from_nodes(
    const std::vector<std::pair<ProcessGroupNode, std::string>>& nodes) {
  std::map<std::string, int> index;
  std::vector<std::string> roots;
  const int n = static_cast<int>(nodes.size());
  for (int i = 0; i < n; ++i) {
    const auto& [node, above] = nodes[i];
    if (!index.emplace(node.name, i).second)
      throw RepeatedName("the node '", printable(node.name),
                         "' is duplicated; give each its own name");
    if (above.empty()) roots.push_back(node.name);
  }
  std::vector<int> parent(n, -1);
  std::vector<std::vector<int>> children(n);
  for (int i = 0; i < n; ++i) {
    const auto& [node, above] = nodes[i];
    if (above.empty()) continue;
    const auto at = index.find(above);
    if (at == index.end())
      throw UnknownName("node '", printable(node.name), "' names the parent '", printable(above),
                        "', which does not exist");
    parent[i] = at->second;
    children[at->second].push_back(i);
  }
  // Each node is visited once. A walk that meets itself goes around a cycle.
  std::vector<int> walk_of(n, -1);
  for (int i = 0; i < n; ++i) {
    int at = i;
    for (; at >= 0 && walk_of[at] < 0; at = parent[at]) walk_of[at] = i;
    if (at < 0 || walk_of[at] != i) continue;
    std::vector<std::string> path{nodes[at].first.name};
    for (int next = parent[at]; next != at; next = parent[next])
      path.push_back(nodes[next].first.name);
    path.push_back(path.front());
    throw GroupCycle("the nodes ", list(path),
                     " form a cycle: each is the parent of the one before it");
  }
  if (roots.size() != 1)
    throw GroupConfigError("a tree has one root, but ", roots.size(),
                           " nodes have no parent: ", list(roots));
  // Parents may be listed after their children, which keep their order.
  std::vector<int> order{index.at(roots.front())};
  for (std::size_t at = 0; at < order.size(); ++at) {
    const auto& below = children[order[at]];
    order.insert(order.end(), below.begin(), below.end());
  }
  ProcessGroupConfig config(nodes[order.front()].first);
  for (std::size_t at = 1; at < order.size(); ++at)
    config.add_node(nodes[order[at]].first, nodes[order[at]].second);
  return config;
}

int ProcessGroupConfig::find(const std::string& name) const {
  if (const auto at = index_.find(name); at != index_.end()) return at->second;
  throw UnknownName("there is no group '", printable(name), "'; the nodes are ",
                    list(mapped(nodes_, [](const Item& item) { return item.node.name; })));
}

bool ProcessGroupConfig::contains(const std::string& name) const { return index_.contains(name); }

const ProcessGroupNode& ProcessGroupConfig::node(const std::string& name) const {
  return nodes_[find(name)].node;
}
bool ProcessGroupConfig::is_leaf(const std::string& name) const {
  return nodes_[find(name)].children.empty();
}

std::string ProcessGroupConfig::parent(const std::string& name) const {
  const int above = nodes_[find(name)].parent;
  return above < 0 ? "" : nodes_[above].node.name;
}

std::vector<std::string> ProcessGroupConfig::children(const std::string& name) const {
  return mapped(nodes_[find(name)].children, [&](int child) { return nodes_[child].node.name; });
}

std::vector<std::string> ProcessGroupConfig::ancestors(const std::string& name) const {
  std::vector<std::string> names;
  for (int at = nodes_[find(name)].parent; at >= 0; at = nodes_[at].parent)
    names.push_back(nodes_[at].node.name);
  return names;
}

void ProcessGroupConfig::add_node(ProcessGroupNode node, const std::string& parent) {
  check_name(node.name, "node");
  if (node.name == "world")
    throw GroupConfigError(
        "only the root may be named 'world', for the scope 'world' means the root; choose another "
        "name");
  if (contains(node.name))
    throw RepeatedName("the node '", node.name, "' is duplicated; give each its own name");
  if (node.size) check_size(node.name, *node.size);
  if (!contains(parent))
    throw UnknownName("node '", node.name, "' names the parent '", parent,
                      "', which does not exist; the nodes are ", list(node_names()));
  const int above = find(parent);
  const int depth = nodes_[above].depth + 1;
  if (depth > kDeepest)
    throw GroupConfigError("node '", node.name, "' is ", depth, " levels deep; at most ", kDeepest);
  const int here = static_cast<int>(nodes_.size());
  nodes_[above].children.push_back(here);
  index_.emplace(node.name, here);
  nodes_.push_back({std::move(node), above, {}, depth});
}

void ProcessGroupConfig::add_orthogonal(OrthogonalGroup group) {
  check_name(group.name, "orthogonal group");
  if (group.of.empty())
    throw GroupConfigError("the orthogonal group '", group.name,
                           "' names no node that it is orthogonal to");
  orthogonal_.push_back(std::move(group));
}

std::vector<int> ProcessGroupConfig::below(int at) const {
  std::vector<int> found, open{at};
  while (!open.empty()) {
    const int next = open.back();
    open.pop_back();
    found.push_back(next);
    const auto& children = nodes_[next].children;
    open.insert(open.end(), children.rbegin(), children.rend());
  }
  return found;
}

std::vector<std::string> ProcessGroupConfig::node_names() const {
  return mapped(below(0), [&](int at) { return nodes_[at].node.name; });
}

std::vector<std::string> ProcessGroupConfig::leaf_groups() const {
  return leaf_groups(root().name);
}

std::vector<std::string> ProcessGroupConfig::leaf_groups(const std::string& below_name) const {
  std::vector<std::string> names;
  for (const int at : below(find(below_name)))
    if (nodes_[at].children.empty()) names.push_back(nodes_[at].node.name);
  return names;
}

std::vector<std::string> ProcessGroupConfig::closeness() const {
  std::vector<std::string> names;
  // Nodes still to be visited, the next one last, with the order for their children.
  std::vector<std::pair<int, std::string>> open{{0, kFirst}};
  while (!open.empty()) {
    const auto [node, direction_above] = std::move(open.back());
    open.pop_back();
    const Item& item = nodes_[node];
    if (item.children.empty()) {
      names.push_back(item.node.name);
      continue;
    }
    const std::string& own = item.node.order;
    const bool direction = own == kFirst || own == kLast;
    const std::string passed_on = direction ? own : direction_above;
    auto order = item.children;
    if (!own.empty() && !direction) {
      const auto named = split_order(own);
      const auto same_names = [&](std::vector<std::string> all) {
        auto sorted = named;
        std::ranges::sort(sorted);
        std::ranges::sort(all);
        return sorted == all;
      };
      const auto leaves = leaf_groups(item.node.name);
      if (same_names(children(item.node.name))) {
        order = mapped(named, [&](const std::string& name) { return find(name); });
      } else if (same_names(leaves)) {
        names.insert(names.end(), named.begin(), named.end());
        continue;
      } else {
        throw GroupConfigError(
            "the order '", own, "' of group '", item.node.name,
            "' must be 'first-adjacent', 'last-adjacent', or name each of its children ",
            list(children(item.node.name)), " or each of its leaves ", list(leaves), " once");
      }
    } else if (passed_on == kLast) {
      std::ranges::reverse(order);
    }
    for (auto child = order.rbegin(); child != order.rend(); ++child)
      open.emplace_back(*child, passed_on);
  }
  return names;
}

std::vector<OrthogonalGroup> ProcessGroupConfig::orthogonal_groups() const {
  std::vector<OrthogonalGroup> groups;
  for (const auto& name : node_names()) {
    const auto& node = this->node(name);
    if (!node.orthogonal_group.empty())
      groups.push_back({node.orthogonal_group, {node.name}, node.scope, node.options});
  }
  groups.insert(groups.end(), orthogonal_.begin(), orthogonal_.end());
  return groups;
}

std::string ProcessGroupConfig::scope_of(const OrthogonalGroup& group) const {
  // The root of resolve(), which is above this one.
  if (inside_a_world() && group.of == std::vector{root().name}) return "world";
  for (const auto& name : group.of)
    if (parent(name).empty())
      throw OrthogonalityError(
          concat("the orthogonal group '", group.name, "' is of the root '", name,
                 "': there is no rank outside the root, so it has no orthogonal groups"),
          {});
  if (group.scope == "world") return root().name;
  if (!group.scope.empty() && group.scope != "parent") return nodes_[find(group.scope)].node.name;
  for (const auto& candidate : ancestors(group.of.front())) {
    const bool common = std::ranges::all_of(group.of, [&](const std::string& name) {
      const auto above = ancestors(name);
      return std::ranges::find(above, candidate) != above.end();
    });
    if (common) return candidate;
  }
  return root().name;
}

void ProcessGroupConfig::set_leaf_group_sizes(const std::map<std::string, int>& sizes,
                                              bool update_parents) {
  for (const auto& [name, size] : sizes) {
    if (!contains(name))
      throw UnknownName("there is no leaf group '", name, "'; the leaves are ",
                        list(leaf_groups()));
    if (!is_leaf(name))
      throw GroupConfigError("group '", name,
                             "' is not a leaf: its size is the product of its children ",
                             list(children(name)), "; set those");
    check_size(name, size);
  }
  for (const auto& [name, size] : sizes) nodes_[find(name)].node.size = size;
  if (!update_parents) return;
  const auto products = all_sizes();
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (!nodes_[i].children.empty()) nodes_[i].node.size = products[i];
}

std::vector<std::optional<int>> ProcessGroupConfig::all_sizes() const {
  std::vector<std::optional<int>> sizes(nodes_.size());
  // Children come after their parents, so that going backwards visits them first.
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    const Item& item = nodes_[i];
    if (item.children.empty()) {
      sizes[i] = item.node.size;
      continue;
    }
    long long product = 1;
    bool known = true;
    for (const int child : item.children) {
      known = known && sizes[child].has_value();
      if (!known) break;
      product *= *sizes[child];
      if (product > std::numeric_limits<int>::max())
        throw GroupConfigError("the leaves of group '", item.node.name, "' multiply to more than ",
                               std::numeric_limits<int>::max(), " ranks");
    }
    if (known) sizes[i] = static_cast<int>(product);
  }
  return sizes;
}

void ProcessGroupConfig::set_options(const std::string& name, GroupOptions options) {
  nodes_[find(name)].node.options = std::move(options);
}
void ProcessGroupConfig::set_order(const std::string& name, std::string order) {
  nodes_[find(name)].node.order = std::move(order);
}

void ProcessGroupConfig::set_orthogonal(const std::string& name, std::string orthogonal_group,
                                        std::string scope) {
  auto& node = nodes_[find(name)].node;
  node.orthogonal_group = std::move(orthogonal_group);
  node.scope = std::move(scope);
}

std::optional<int> ProcessGroupConfig::size(const std::string& name) const {
  long long product = 1;
  for (const auto& leaf : leaf_groups(name)) {
    const auto& size = node(leaf).size;
    if (!size) return std::nullopt;
    product *= *size;
    if (product > std::numeric_limits<int>::max())
      throw GroupConfigError("the leaves of group '", name, "' multiply to more than ",
                             std::numeric_limits<int>::max(), " ranks");
  }
  return static_cast<int>(product);
}

std::string ProcessGroupConfig::drawn() const {
  const auto sizes = all_sizes();
  std::string text;
  struct Open {
    int node;
    std::string indent;
    bool last;
  };
  // Nodes still to be drawn, the next one last.
  std::vector<Open> open;
  const auto add_children = [&](int at, const std::string& indent) {
    const auto& children = nodes_[at].children;
    for (std::size_t i = children.size(); i-- > 0;)
      open.push_back({children[i], indent, i + 1 == children.size()});
  };
  add_children(0, "");
  while (!open.empty()) {
    const Open next = std::move(open.back());
    open.pop_back();
    const auto& node = nodes_[next.node].node;
    const auto& known = sizes[next.node];
    text += concat(next.indent, next.last ? "`- " : "|- ", node.name, " ",
                   known ? std::to_string(*known) : "?");
    if (!node.orthogonal_group.empty())
      text += concat(", orthogonal ", node.orthogonal_group, " in ",
                     scope_of({node.orthogonal_group, {node.name}, node.scope, {}}));
    if (!node.order.empty()) text += concat(", order ", node.order);
    text += options_text(node.options) + "\n";
    add_children(next.node, next.indent + (next.last ? "   " : "|  "));
  }
  return text;
}

std::string ProcessGroupConfig::to_string() const {
  const auto known = size(root().name);
  std::string text = concat(root().name, " ", known ? std::to_string(*known) : "?");
  if (inside_a_world() && !root().orthogonal_group.empty())
    text += concat(", orthogonal ", root().orthogonal_group, " in world");
  if (!root().order.empty()) text += concat(", order ", root().order);
  text += options_text(root().options) + "\n";
  text += drawn();
  for (const auto& group : orthogonal_)
    text += concat("orthogonal ", group.name, " of ", list(group.of), " in ", scope_of(group),
                   options_text(group.options), "\n");
  return text + concat("order ", joined(closeness(), "-"), " (first = adjacent ranks)\n");
}

bool ProcessGroupConfig::operator==(const ProcessGroupConfig& other) const {
  if (node_names() != other.node_names() || orthogonal_ != other.orthogonal_) return false;
  for (const auto& name : node_names())
    if (!(node(name) == other.node(name)) || parent(name) != other.parent(name)) return false;
  return true;
}

}  // namespace tessera
