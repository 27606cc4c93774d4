#include "tessera/config/group_config_file.h"

#include <algorithm>
#include <climits>
#include <set>

#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/detail/fields.h"
#include "tessera/config/errors.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

using detail::Fields;
using detail::Json;
using NodeList = std::vector<std::pair<ProcessGroupNode, std::string>>;

void read_attributes(Fields& fields, ProcessGroupNode& node) {
  if (const auto size = fields.integer("size", INT_MIN, INT_MAX))
    node.size = static_cast<int>(*size);
  node.orthogonal_group = fields.text("orthogonal_group").value_or("");
  node.scope = fields.text("scope").value_or("");
  node.order = fields.text("order").value_or("");
  node.options.backend = fields.text("backend").value_or("");
  node.options.timeout = fields.duration("timeout");
  if (!node.scope.empty() && node.orthogonal_group.empty())
    fields.fail("scope", "is of an orthogonal group, but 'orthogonal_group' is not given");
}

void read_nested(Fields& fields, const std::string& parent, NodeList& nodes) {
  ProcessGroupNode node{.name = fields.required_text("name")};
  read_attributes(fields, node);
  nodes.emplace_back(node, parent);
  fields.each("children", [&](Fields& child) { read_nested(child, node.name, nodes); });
}

NodeList read_flat(Fields& fields, const Json& tree) {
  if (!tree.is_object())
    fields.fail("tree", "must map nodes to lists of children, but is ", detail::shown(tree));
  Fields edges(tree, fields.where("tree"));
  NodeList nodes;
  std::set<std::string> parents, children;
  for (const auto& [parent, unused] : tree.items()) {
    parents.insert(parent);
    const auto below = edges.texts(parent);
    for (const auto& child : below.value_or(std::vector<std::string>{})) {
      nodes.push_back({ProcessGroupNode{.name = child}, parent});
      children.insert(child);
    }
  }
  for (const auto& parent : parents)
    if (!children.contains(parent))
      nodes.insert(nodes.begin(), {ProcessGroupNode{.name = parent}, ""});
  const auto find = [&](const std::string& name, const std::string& field) -> ProcessGroupNode& {
    for (auto& [node, parent] : nodes)
      if (node.name == name) return node;
    throw UnknownName(fields.where(field), ": there is no node '", name, "' in the tree");
  };
  if (const Json* options = fields.raw("nodes")) {
    Fields by_name(*options, fields.where("nodes"));
    for (const auto& [name, value] : options->items()) {
      by_name.raw(name);
      Fields attributes(value, by_name.where(name));
      read_attributes(attributes, find(name, "nodes"));
      attributes.finish();
    }
  }
  if (const Json* sizes = fields.raw("leaf_sizes")) {
    Fields by_name(*sizes, fields.where("leaf_sizes"));
    for (const auto& [name, value] : sizes->items()) {
      if (tree.contains(name))
        by_name.fail(name, "is not a leaf: its size is the product of its children");
      if (const auto size = by_name.integer(name, INT_MIN, INT_MAX))
        find(name, "leaf_sizes").size = static_cast<int>(*size);
    }
  }
  if (const auto order = fields.text("order"))
    for (auto& [node, parent] : nodes)
      if (parent.empty()) node.order = *order;
  return nodes;
}

Json write_node(const ProcessGroupConfig& config, const std::string& name) {
  const auto& node = config.node(name);
  Json out = Json::object();
  out["name"] = name;
  if (node.size) out["size"] = *node.size;
  if (!node.order.empty()) out["order"] = node.order;
  if (!node.orthogonal_group.empty()) out["orthogonal_group"] = node.orthogonal_group;
  if (!node.scope.empty()) out["scope"] = node.scope;
  if (!node.options.backend.empty()) out["backend"] = node.options.backend;
  if (node.options.timeout) out["timeout"] = concat(node.options.timeout->count(), "ms");
  for (const auto& child : config.children(name))
    out["children"].push_back(write_node(config, child));
  return out;
}

}  // namespace

ProcessGroupConfig parse_group_config(const std::string& text, FileFormat format,
                                      const std::string& source) {
  const Json document = detail::parse_document(text, format, source);
  Fields fields(document, source + ": ");
  NodeList nodes;
  if (const Json* tree = fields.raw("tree"))
    nodes = read_flat(fields, *tree);
  else
    read_nested(fields, "", nodes);
  auto config = ProcessGroupConfig::from_nodes(nodes);
  fields.each("orthogonal", [&](Fields& group) {
    OrthogonalGroup read;
    read.name = group.required_text("name");
    read.of = group.texts("of").value_or(std::vector<std::string>{});
    read.scope = group.text("scope").value_or("");
    read.options.backend = group.text("backend").value_or("");
    read.options.timeout = group.duration("timeout");
    group.finish();
    config.add_orthogonal(std::move(read));
  });
  fields.finish();
  return config;
}

ProcessGroupConfig read_group_config(const std::string& path) {
  return parse_group_config(detail::read_text(path), detail::format_of(path), path);
}

std::string format_group_config(const ProcessGroupConfig& config, FileFormat format) {
  Json out = write_node(config, config.root().name);
  for (const auto& group : config.added_orthogonal()) {
    Json entry{{"name", group.name}, {"of", group.of}};
    if (!group.scope.empty()) entry["scope"] = group.scope;
    if (!group.options.backend.empty()) entry["backend"] = group.options.backend;
    if (group.options.timeout) entry["timeout"] = concat(group.options.timeout->count(), "ms");
    out["orthogonal"].push_back(entry);
  }
  return detail::write_document(out, format);
}

void write_group_config(const ProcessGroupConfig& config, const std::string& path) {
  detail::write_text(path, format_group_config(config, detail::format_of(path)));
}

}  // namespace tessera
