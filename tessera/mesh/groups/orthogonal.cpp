#include "tessera/mesh/groups/orthogonal.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

/// For each rank the index of its group. Throws OrthogonalityError for ranks in two groups.
std::unordered_map<int, int> owners(const RankLists& groups, const std::string& what) {
  std::unordered_map<int, int> owner;
  std::vector<int> twice;
  for (int g = 0; g < static_cast<int>(groups.size()); ++g)
    for (int rank : groups[g])
      if (!owner.emplace(rank, g).second) twice.push_back(rank);
  if (!twice.empty())
    throw OrthogonalityError(concat("the groups of ", what, " overlap: ranks ", list(twice),
                                    " are in more than one of them, or twice in one"),
                             twice);
  return owner;
}

}  // namespace

void require_partition(const RankLists& groups, std::span<const int> scope,
                       const std::string& what) {
  const auto owner = owners(groups, what);
  std::unordered_map<int, int> inside;
  for (int rank : scope) inside.emplace(rank, 0);
  std::vector<int> foreign;
  for (const auto& group : groups)
    for (int rank : group)
      if (!inside.contains(rank)) foreign.push_back(rank);
  if (!foreign.empty()) {
    std::ranges::sort(foreign);
    throw OrthogonalityError(concat("the groups of ", what, " reach out of their scope ",
                                    list(scope), ": ranks ", list(foreign), " do not belong to it"),
                             foreign);
  }
  const auto missing = filtered(scope, [&](int rank) { return !owner.contains(rank); });
  if (!missing.empty())
    throw OrthogonalityError(concat("the groups of ", what, " do not cover their scope ",
                                    list(scope), ": ranks ", list(missing), " are in none of them"),
                             missing);
}

void require_orthogonal(const RankLists& a, const std::string& a_name, const RankLists& b,
                        const std::string& b_name, std::span<const int> scope,
                        const std::string& scope_name) {
  require_partition(a, scope, concat("'", a_name, "' in scope '", scope_name, "'"));
  require_partition(b, scope, concat("'", b_name, "' in scope '", scope_name, "'"));
  const auto owner_b = owners(b, b_name);
  // the group of a that last met each group of b, and the rank in which
  std::vector<int> met(b.size(), -1);
  std::vector<int> where(b.size(), -1);
  for (int i = 0; i < static_cast<int>(a.size()); ++i) {
    for (int rank : a[i]) {
      const int j = owner_b.at(rank);
      if (met[j] == i)
        throw OrthogonalityError(
            concat("'", b_name, "' is not orthogonal to '", a_name, "' in scope '", scope_name,
                   "': the groups ", list(a[i]), " and ", list(b[j]), " share the ranks ", where[j],
                   " and ", rank, ", but must meet in exactly one"),
            {where[j], rank});
      met[j] = i;
      where[j] = rank;
    }
    if (a[i].size() != b.size()) {
      for (int j = 0; j < static_cast<int>(b.size()); ++j)
        if (met[j] != i)
          throw OrthogonalityError(
              concat("'", b_name, "' is not orthogonal to '", a_name, "' in scope '", scope_name,
                     "': the groups ", list(a[i]), " and ", list(b[j]),
                     " share no rank, but must meet in exactly one"),
              b[j]);
    }
  }
}

void require_orthogonal(const RankLists& a, const std::string& a_name, const RankLists& b,
                        const std::string& b_name, const RankLists& scopes,
                        const std::string& scope_name) {
  const auto scope_of = owners(scopes, scope_name);
  const auto sort_out = [&](const RankLists& groups, const std::string& name) {
    std::vector<RankLists> by_scope(scopes.size());
    for (const auto& group : groups) {
      if (group.empty()) throw OrthogonalityError(concat("a group of '", name, "' is empty"), {});
      const auto home = scope_of.find(group.front());
      if (home == scope_of.end())
        throw OrthogonalityError(concat("rank ", group.front(), " of '", name,
                                        "' is in no group of the scope '", scope_name, "'"),
                                 {group.front()});
      std::vector<int> outside;
      for (int rank : group)
        if (const auto other = scope_of.find(rank);
            other == scope_of.end() || other->second != home->second)
          outside.push_back(rank);
      if (!outside.empty())
        throw OrthogonalityError(
            concat("the group ", list(group), " of '", name, "' leaves the scope '", scope_name,
                   "' of rank ", group.front(), ", which is ", list(scopes[home->second]),
                   ": ranks ", list(outside),
                   " have other coordinates outside that scope; reducing over them would mix what "
                   "they hold"),
            outside);
      by_scope[home->second].push_back(group);
    }
    return by_scope;
  };
  const auto in_a = sort_out(a, a_name), in_b = sort_out(b, b_name);
  for (std::size_t s = 0; s < scopes.size(); ++s)
    require_orthogonal(in_a[s], a_name, in_b[s], b_name, scopes[s], scope_name);
}

namespace {

// Arrays by rank if the table is dense, by position (one look-up more) if it has wide gaps.
struct RankSlots {
  explicit RankSlots(const Mesh& m) : mesh(m), highest(*std::ranges::max_element(m.ranks())) {}
  int operator()(int rank) const { return dense ? rank : mesh.position(rank); }
  const Mesh& mesh;
  const int highest;
  const bool dense = highest < 4LL * mesh.size() + 64;
  const std::size_t count = dense ? highest + 1 : mesh.size();
};

}  // namespace

MeshValidation validate(const Mesh& mesh) {
  MeshValidation result;
  if (mesh.dims() > 20)
    throw InvalidArgument("a mesh with ", mesh.dims(),
                          " axes has too many sets of axes to check; the limit is 20 axes");
  const int n = mesh.size();
  if (n == 0) return result;
  const RankSlots index(mesh);
  std::vector<int> group_of(index.count);
  std::vector<unsigned> b_seen(index.count, ~0U);
  std::vector<std::int64_t> met(n, -1);
  const auto name = [&](const std::vector<int>& axes) {
    return list(mapped(axes, [&](int axis) { return mesh.axes()[axis].name; }));
  };
  const auto twice = [&](int rank, const std::vector<int>& axes) {
    return OrthogonalityError(
        concat("rank ", rank, " is in two groups of axes ", name(axes), " of ", mesh), {rank});
  };
  const unsigned all = (1u << mesh.dims()) - 1;
  std::int64_t stamp = 0;
  for (unsigned set = 0; set <= all; ++set) {
    if (set > (all ^ set)) continue;  // each pair of complements once
    const auto axes = numbers_below(mesh.dims(), [&](int axis) { return (set >> axis & 1) != 0; });
    const auto rest = mesh.complement(axes);
    const auto a = mesh.groups(axes), b = mesh.groups(rest);
    result.axis_sets += set == (all ^ set) ? 1 : 2;
    result.groups += a.count() + (set == (all ^ set) ? 0 : b.count());
    if (static_cast<int>(a.members.size()) != n || static_cast<int>(b.members.size()) != n ||
        static_cast<long long>(a.group_size) * b.group_size != n)
      throw OrthogonalityError(
          concat("the groups of axes ", name(axes), " hold ", a.members.size(), " and those of ",
                 name(rest), " ", b.members.size(), " of the ", n, " ranks of ", mesh),
          {});
    // A partition has as many members as ranks, none twice.
    std::ranges::fill(group_of, -1);
    for (int i = 0; i < a.count(); ++i)
      for (int rank : a[i]) {
        int& owner = group_of[index(rank)];
        if (owner >= 0) throw twice(rank, axes);
        owner = i;
      }
    // The same for the complement; and a group of it must not meet one group of a twice. With the
    // sizes above that makes it exactly once.
    for (int j = 0; j < b.count(); ++j, ++stamp)
      for (int rank : b[j]) {
        const auto at = index(rank);
        if (std::exchange(b_seen[at], set) == set) throw twice(rank, rest);
        const int owner = group_of[at];
        if (met[owner] == stamp)
          throw OrthogonalityError(
              concat("a group of axes ", name(axes), " meets its complement in rank ", rank,
                     " and another of ", mesh),
              {rank});
        met[owner] = stamp;
      }
  }
  return result;
}

}  // namespace tessera
