#pragma once
// GroupPlan: every group family of a job by name, as layouts over rank tables. Apart from the
// tables its size does not depend on the world, so that each rank can hold the whole plan, compare
// it with the others' by a hash, and list just the groups that it belongs to.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/groups/group_config.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/views.h"

namespace tessera {

/// The groups along a set of axes of one view.
struct GroupFamily {
  enum class Kind { axes, node, leaf, orthogonal };
  std::string name = {};
  Kind kind = Kind::axes;
  int view = 0;
  /// Indices of axes in that view's mesh.
  std::vector<int> axes = {};
  GroupOptions options = {};
  /// The families that an orthogonal family is orthogonal to ...
  std::vector<std::string> of = {};
  /// ... and the family within which it is.
  std::string scope = {};
};

/// One group that a rank belongs to.
struct Membership {
  std::string family = {};
  /// Ranks in group order.
  std::vector<int> ranks = {};
  int group_rank = 0;
  GroupOptions options = {};
};

class GroupPlan {
 public:
  explicit GroupPlan(Mesh mesh, std::string view = "mesh");
  /// One family per axis of each view; axes that views share count once.
  explicit GroupPlan(const MeshViews& views);
  /// One family per axis of the mesh.
  static GroupPlan of_mesh(Mesh mesh);
  /// One family per node and one per orthogonal group. Throws what ProcessGroupConfig::resolve()
  /// throws, RepeatedName, and OrthogonalityError, with the offending ranks, for an orthogonal
  /// group that breaks the rule: that of the root, of overlapping nodes, in a scope that does not
  /// contain it, or in a scope that it fills, where nothing is left to be orthogonal to.
  static GroupPlan of_config(const ProcessGroupConfig& config, int world_size);
  static GroupPlan of_config(const ProcessGroupConfig& config, std::vector<int> ranks);

  /// Adds a family. Throws RepeatedName, InvalidArgument (axis or view out of range).
  void add(GroupFamily family);
  /// Adds the family over axes of the first view: "tp-pp". A single axis that already is a family
  /// is left as it is.
  void add_axes(const std::string& names);

  const std::vector<GroupFamily>& families() const { return families_; }
  /// The family of this name. Throws UnknownName with the known names.
  const GroupFamily& family(const std::string& name) const;
  /// The mesh of the first view.
  const Mesh& mesh() const { return views_.front().second; }
  const Mesh& mesh(const GroupFamily& family) const { return views_[family.view].second; }
  int size() const { return mesh().size(); }
  int group_size(const std::string& name) const;
  std::vector<int> group(const std::string& name, int rank) const;
  int group_rank(const std::string& name, int rank) const;
  GroupTable groups(const std::string& name) const;
  /// All groups of one rank, in the order of the families.
  std::vector<Membership> memberships(int rank) const;

  /// The plan as text: one line per view (its axes and ranks) and one per family (its layout and
  /// options); equal texts mean equal groups for every rank.
  std::string canonical() const;
  /// Hash of canonical().
  std::uint64_t hash() const;

 private:
  std::vector<std::pair<std::string, Mesh>> views_;
  std::vector<GroupFamily> families_;
};

/// The first line in which two canonical texts differ.
struct PlanDifference {
  /// Number of the line, from 1.
  int line = 0;
  /// The lines; empty where a text has ended.
  std::string mine, theirs;
};
std::optional<PlanDifference> first_difference(const std::string& mine, const std::string& theirs);

}  // namespace tessera
