#pragma once
// ProcessGroupConfig: a tree of process groups. Leaves have sizes, a parent's size is the product
// of its children's, and every leaf is an axis of a mesh.
//
//   world
//   |- mp 2
//   `- dp
//      |- shard 4
//      `- replicate 2
//
// Closeness: by default the first leaf has adjacent ranks (mp: 0,1), the next one strides over it
// (shard: 0,2,4,6), and the last is farthest (replicate: 0,8). A mesh is written the other way
// round, outermost first: replicate=2 x shard=4 x mp=2.

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

/// How the groups of one node are made.
struct GroupOptions {
  /// Empty: the manager's.
  std::string backend = {};
  /// Absent: the manager's.
  std::optional<std::chrono::milliseconds> timeout = {};
  bool operator==(const GroupOptions&) const = default;
};

/// A node of the tree.
struct ProcessGroupNode {
  std::string name = {};
  /// The size of a leaf; absent: open (one leaf may be; its size follows from the world). The size
  /// of an inner node is compared with the product of the leaves below.
  std::optional<int> size = {};
  /// Name of the groups orthogonal to this node's (they have its options); empty: none.
  std::string orthogonal_group = {};
  /// The scope of the orthogonal groups: "parent" (also when empty), "world", or the name of an
  /// ancestor.
  std::string scope = {};
  /// Which of the leaves below have adjacent ranks: "first-adjacent" (default), "last-adjacent", or
  /// a list, nearest first, joined by dashes, of all children ("shard-replicate") or of all leaves
  /// below. Empty: as for the parent.
  std::string order = {};
  GroupOptions options = {};
  bool operator==(const ProcessGroupNode&) const = default;
};

/// Groups orthogonal to a leaf, an inner node, or a set of nodes.
struct OrthogonalGroup {
  std::string name = {};
  /// Names of nodes, none of which is inside another.
  std::vector<std::string> of = {};
  /// The scope, as ProcessGroupNode has it; the parent of several nodes is their nearest common
  /// ancestor.
  std::string scope = {};
  GroupOptions options = {};
  bool operator==(const OrthogonalGroup&) const = default;
};

class ProcessGroupConfig {
 public:
  explicit ProcessGroupConfig(ProcessGroupNode root = {.name = "world"});
  /// Builds a tree from nodes with their parents' names, in any order; exactly one has no parent.
  /// Throws RepeatedName, UnknownName, GroupCycle, with the names.
  static ProcessGroupConfig from_nodes(
      const std::vector<std::pair<ProcessGroupNode, std::string>>& nodes);

  /// Appends a node as the last child of `parent`. Throws RepeatedName, UnknownName (parent),
  /// GroupConfigError (size below 1, reserved name).
  void add_node(ProcessGroupNode node, const std::string& parent);
  void add_orthogonal(OrthogonalGroup group);

  const ProcessGroupNode& root() const { return nodes_.front().node; }
  /// The node of this name. Throws UnknownName with the known names.
  const ProcessGroupNode& node(const std::string& name) const;
  bool contains(const std::string& name) const;
  bool is_leaf(const std::string& name) const;
  /// Name of the parent; empty for the root.
  std::string parent(const std::string& name) const;
  /// Names of the children in the order in which they were added.
  std::vector<std::string> children(const std::string& name) const;
  /// Names of the ancestors, parent first, root last.
  std::vector<std::string> ancestors(const std::string& name) const;
  /// Names of all nodes in tree order, parents before children.
  std::vector<std::string> node_names() const;
  /// Names of all leaves in tree order.
  std::vector<std::string> leaf_groups() const;
  std::vector<std::string> leaf_groups(const std::string& below) const;
  /// All leaves, nearest (adjacent ranks) first, as the nodes' `order` determines.
  std::vector<std::string> closeness() const;
  /// The orthogonal groups that nodes name and those added by add_orthogonal().
  std::vector<OrthogonalGroup> orthogonal_groups() const;
  const std::vector<OrthogonalGroup>& added_orthogonal() const { return orthogonal_; }
  /// The scope of an orthogonal group as a node's name; that of a root inside a larger world is
  /// "world". Throws UnknownName or OrthogonalityError (without ranks, for sizes may be open here).
  std::string scope_of(const OrthogonalGroup& group) const;

  /// Sets sizes of leaves; with `update_parents` the size of every inner node becomes the product
  /// of its children's if those are known, else open. All or nothing: throws for an unknown leaf,
  /// an inner node or a size below 1, and then changes nothing.
  void set_leaf_group_sizes(const std::map<std::string, int>& sizes, bool update_parents = true);
  void set_options(const std::string& name, GroupOptions options);
  void set_order(const std::string& name, std::string order);
  void set_orthogonal(const std::string& name, std::string orthogonal_group,
                      std::string scope = "");

  /// The product of the leaves below; absent while one of them is open.
  std::optional<int> size(const std::string& name) const;
  /// True if the root is a model inside a larger world: it is not named "world" and names groups
  /// that are orthogonal to it.
  bool inside_a_world() const;
  /// The tree of a model inside a larger world: a root "world", below it this tree, and beside that
  /// an open leaf that counts the model's replicas. The leaf has the name (and the options) of the
  /// groups that are orthogonal to the root, or `replicas` if there are none. Throws
  /// GroupConfigError for a root named "world", RepeatedName for a leaf whose name a node has.
  ProcessGroupConfig inside_world(const std::string& replicas = "data_parallel") const;
  /// The tree with the size of the open leaf, if any, inferred, and the size of every inner node
  /// set; a tree whose root is a model inside a larger world (inside_a_world()) is first put below
  /// a world, so that its replicas are as many as the world has room for. Throws UnsetSize (two or
  /// more open), WorldSizeMismatch (the product does not divide, or is not, the world, or an inner
  /// node's stated size is not its product); where a tree inside a larger world would fit, the
  /// message draws it.
  ProcessGroupConfig resolve(int world_size) const;

  /// The resolved tree's mesh: one axis per leaf, outermost first, over ranks 0 .. world - 1.
  Mesh mesh(int world_size) const;
  /// Makes the same mesh over any ranks, in this order.
  Mesh mesh(std::vector<int> ranks) const;

  /// The tree as drawn above, with options, and the order of the leaves as text.
  std::string to_string() const;
  bool operator==(const ProcessGroupConfig& other) const;

 private:
  struct Item {
    ProcessGroupNode node;
    int parent = -1;
    std::vector<int> children;
    // Level in the tree; the root has 1.
    int depth = 1;
  };
  int find(const std::string& name) const;
  // A node and all nodes below it, each before its children.
  std::vector<int> below(int at) const;
  // The product of the leaves below each node, where all of them are known.
  std::vector<std::optional<int>> all_sizes() const;
  // What to write where the leaves multiply to `product`, fewer ranks than the world has.
  std::string advice(int world_size, long long product) const;
  // Every node below the root on a line of its own.
  std::string drawn() const;

  // Root first, children after their parents.
  std::vector<Item> nodes_;
  std::map<std::string, int> index_;
  std::vector<OrthogonalGroup> orthogonal_;
};

}  // namespace tessera
