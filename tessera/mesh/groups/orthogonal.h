#pragma once
// The rule of orthogonality, checked on rank lists:
//
//   In a scope S (a set of ranks), the groups of a set of axes A and those of its complement B
//   each partition S, and every group of A meets every group of B in exactly one rank.
//
// Example: world -> {mp 2, dp -> {shard 4, replicate 2}} on 16 ranks, mp adjacent. The scope of
// rank 0 in dp is {0, 2, 4, 6, 8, 10, 12, 14}. shard's groups there are {0, 2, 4, 6} and {8, 10,
// 12, 14}; orthogonal to them are {0, 8}, {2, 10}, {4, 12}, {6, 14}. The list {0, 8, 1, 9} is not:
// ranks 1 and 9 are outside the scope, for they hold another slice of the model.

#include <span>
#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

using RankLists = std::vector<std::vector<int>>;

/// Checks that every rank of `scope` is in exactly one group, and that no group holds another rank.
/// Throws OrthogonalityError with the ranks that are missing, duplicate or outside. `what` names
/// the groups in the message.
void require_partition(const RankLists& groups, std::span<const int> scope,
                       const std::string& what);

/// Checks the whole rule for one scope: both families partition it and their groups meet in one
/// rank. Throws OrthogonalityError with the offending ranks.
void require_orthogonal(const RankLists& a, const std::string& a_name, const RankLists& b,
                        const std::string& b_name, std::span<const int> scope,
                        const std::string& scope_name);

/// Checks several scopes (the groups of a scope family): each group of `a` and `b` must be inside
/// one of them, and the rule holds in each.
void require_orthogonal(const RankLists& a, const std::string& a_name, const RankLists& b,
                        const std::string& b_name, const RankLists& scopes,
                        const std::string& scope_name);

/// What validate() has checked.
struct MeshValidation {
  /// Number of sets of axes: 2^dims.
  int axis_sets = 0;
  /// Number of groups of all axis sets together.
  long long groups = 0;
};

/// Builds the groups of every set of axes of the mesh and of its complement, and checks by counting
/// that they partition the mesh and meet in one rank. Linear in ranks x axis sets: a million ranks
/// on five axes take about a second. Throws OrthogonalityError; a Mesh as constructed never breaks
/// the rule, so this call proves it.
MeshValidation validate(const Mesh& mesh);

}  // namespace tessera
