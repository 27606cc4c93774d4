// The algebra over tens of thousands of generated meshes, against groupings by coordinate that
// share no code with Mesh::group.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "random_mesh.h"
#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/order.h"
#include "tessera/mesh/views.h"

using namespace tessera;

namespace {

constexpr int kMeshes = 20000;

/// Groups of an axis set, by sorting ranks into bins keyed by their coordinates on the other axes,
/// walking the table in mesh order.
std::map<std::vector<int>, std::vector<int>> bins(const Mesh& mesh, unsigned set) {
  std::map<std::vector<int>, std::vector<int>> bins;
  for (int p = 0; p < mesh.size(); ++p) {
    std::vector<int> key;
    int rest = p;
    for (int i = mesh.dims(); i-- > 0; rest /= mesh.axes()[i].size)
      if (!(set >> i & 1)) key.push_back(rest % mesh.axes()[i].size);
    bins[key].push_back(mesh.ranks()[p]);
  }
  return bins;
}

std::vector<int> axes_of(unsigned set, int dims) {
  std::vector<int> axes;
  for (int i = 0; i < dims; ++i)
    if (set >> i & 1) axes.push_back(i);
  return axes;
}

}  // namespace

TEST(MeshProperty, GroupsOfEveryAxisSet) {
  std::mt19937 random(1);
  long long checked = 0;
  for (int n = 0; n < kMeshes; ++n) {
    const Mesh mesh = random_mesh(random);
    for (unsigned set = 0; set < (1u << mesh.dims()); ++set) {
      const auto axes = axes_of(set, mesh.dims());
      const auto expected = bins(mesh, set);
      std::set<std::vector<int>> wanted;
      for (const auto& [key, members] : expected) wanted.insert(members);
      const auto lists = mesh.groups(axes).lists();
      ASSERT_EQ(std::set<std::vector<int>>(lists.begin(), lists.end()), wanted) << mesh;
      ASSERT_EQ(lists.size(), wanted.size());
      // Every rank computes the list that all others compute, and is in it at its group
      // rank.
      for (const auto& members : lists) {
        for (std::size_t i = 0; i < members.size(); ++i) {
          ASSERT_EQ(mesh.group(axes, members[i]), members) << mesh;
          ASSERT_EQ(mesh.group_rank(axes, members[i]), static_cast<int>(i)) << mesh;
        }
      }
      ++checked;
    }
  }
  RecordProperty("axis_sets", std::to_string(checked));
}

TEST(MeshProperty, ComplementsMeetInOneRankInEveryScope) {
  std::mt19937 random(2);
  for (int n = 0; n < kMeshes; ++n) {
    const Mesh mesh = random_mesh(random, 4, 4, 48);
    const unsigned scope = random() % (1u << mesh.dims()), inside = scope & random();
    const auto scope_axes = axes_of(scope, mesh.dims()), axes = axes_of(inside, mesh.dims());
    const auto rest = mesh.complement(axes, scope_axes);
    ASSERT_EQ(rest, axes_of(scope & ~inside, mesh.dims()));
    // By brute force over pairs.
    const auto a = mesh.groups(axes).lists(), b = mesh.groups(rest).lists();
    const auto scopes = mesh.groups(scope_axes).lists();
    for (const auto& ranks : scopes) {
      const std::set<int> members(ranks.begin(), ranks.end());
      for (const auto& ga : a) {
        if (!members.contains(ga.front())) continue;
        for (const auto& gb : b) {
          if (!members.contains(gb.front())) continue;
          int common = 0;
          for (int rank : ga) common += static_cast<int>(std::ranges::count(gb, rank));
          ASSERT_EQ(common, 1) << mesh;
        }
      }
    }
    ASSERT_NO_THROW(require_orthogonal(a, "a", b, "b", scopes, "scope"));
    if (n % 10 == 0) {
      std::int64_t groups = 0;
      for (unsigned set = 0; set < (1u << mesh.dims()); ++set)
        groups += mesh.groups(axes_of(set, mesh.dims())).count();
      const MeshValidation checked = validate(mesh);
      ASSERT_EQ(checked.axis_sets, 1 << mesh.dims());
      ASSERT_EQ(checked.groups, groups);
    }
  }
}

TEST(MeshProperty, ASwapOfTwoRanksIsNoticed) {
  std::mt19937 random(3);
  int noticed = 0;
  for (int n = 0; n < 8000; ++n) {
    const Mesh mesh = random_mesh(random, 3, 4, 40);
    const unsigned set = random() % (1u << mesh.dims());
    const auto axes = axes_of(set, mesh.dims());
    auto a = mesh.groups(axes).lists();
    const auto b = mesh.groups(mesh.complement(axes)).lists();
    if (a.size() < 2 || b.size() < 2) continue;
    // Exchange members of two groups that lie in different groups of the complement: some pair then
    // meets twice.
    const auto i = random() % a.size(), j = (i + 1) % a.size();
    const auto k = random() % a[i].size(), l = (k + 1) % a[j].size();
    std::swap(a[i][k], a[j][l]);
    ASSERT_ANY_THROW(require_orthogonal(a, "a", b, "b", mesh.ranks(), "mesh")) << mesh;
    ++noticed;
  }
  EXPECT_GT(noticed, 1000);
}

TEST(MeshProperty, LookupsAgree) {
  std::mt19937 random(4);
  for (int n = 0; n < kMeshes; ++n) {
    const Mesh mesh = random_mesh(random);
    for (int p = 0; p < mesh.size(); ++p) {
      const int rank = mesh.ranks()[p];
      ASSERT_EQ(mesh.position(rank), p);
      ASSERT_EQ(mesh.rank_at(mesh.coordinate(rank)), rank);
    }
    const std::set<int> ranks(mesh.ranks().begin(), mesh.ranks().end());
    for (int rank = -3; rank < 60; ++rank)
      ASSERT_EQ(mesh.contains(rank), ranks.contains(rank)) << mesh << " " << rank;
  }
}

TEST(MeshProperty, ConversionsRoundTrip) {
  std::mt19937 random(5);
  for (int n = 0; n < kMeshes; ++n) {
    const Mesh mesh = random_mesh(random);
    const auto names = mesh.names();
    // Axis permutation, there and back; no group along any axis changes.
    auto order = names;
    shuffle(order, random);
    const Mesh moved = mesh.permute(order);
    ASSERT_EQ(moved.permute(names), mesh);
    for (const auto& name : names)
      for (int rank : mesh.ranks())
        ASSERT_EQ(moved.group(name, rank), mesh.group(name, rank)) << mesh;
    if (mesh.dims() == 0) continue;
    // A named order and back.
    std::map<std::string, int> sizes;
    for (const Axis& axis : mesh.axes()) sizes[axis.name] = axis.size;
    ASSERT_EQ(axes_from_order(order_of(mesh), sizes), mesh.axes());
    // Flatten some axes: the new axis' groups are those of the set. Unflatten and permute: the mesh
    // again.
    std::vector<std::string> some;
    std::vector<Axis> some_axes;
    for (const Axis& axis : mesh.axes())
      if (random() % 2) {
        some.push_back(axis.name);
        some_axes.push_back(axis);
      }
    if (some.empty()) continue;
    const Mesh flat = mesh.flatten(some, "flat");
    for (int rank : mesh.ranks())
      ASSERT_EQ(flat.group("flat", rank), mesh.group(some, rank)) << mesh;
    ASSERT_EQ(flat.unflatten("flat", some_axes).permute(names), mesh);
    // A sub-mesh holds the group of its axes; its own groups are the mesh's.
    const int rank = mesh.ranks()[random() % mesh.size()];
    const Mesh sub = mesh.submesh(some, rank);
    ASSERT_EQ(sub.ranks(), mesh.group(some, rank));
    for (const auto& name : some) ASSERT_EQ(sub.group(name, rank), mesh.group(name, rank));
    // Slices along an axis, one after the other, are the mesh with that axis outermost.
    const auto& cut = names[random() % names.size()];
    std::vector<int> joined;
    for (int c = 0; c < mesh.size(cut); ++c) {
      const Mesh slice = mesh.slice(cut, c);
      joined.insert(joined.end(), slice.ranks().begin(), slice.ranks().end());
    }
    auto cut_first = names;
    std::stable_partition(cut_first.begin(), cut_first.end(),
                          [&](const std::string& name) { return name == cut; });
    ASSERT_EQ(joined, mesh.permute(cut_first).ranks());
  }
}

TEST(MeshProperty, ViewsAgree) {
  std::mt19937 random(6);
  int refused = 0, accepted = 0;
  for (int n = 0; n < kMeshes; ++n) {
    const Mesh dense = random_mesh(random, 4, 4, 48);
    if (dense.dims() < 1) continue;
    MeshViews views("dense", dense);
    // Split one axis: all others keep their groups, so the view must be accepted ...
    const Axis axis = dense.axes()[random() % dense.dims()];
    int divisor = pick(random, 1, axis.size);
    while (axis.size % divisor) --divisor;
    views.add("split",
              dense.unflatten(axis.name, {{"outer", axis.size / divisor}, {"inner", divisor}}));
    for (const auto& name : views.shared_axes())
      for (int rank : dense.ranks())
        ASSERT_EQ(views.view("split").group(name, rank), dense.group(name, rank));
    ++accepted;
    // ... and one with two ranks exchanged must be accepted exactly if no shared group changed.
    auto ranks = dense.ranks();
    std::swap(ranks[random() % ranks.size()], ranks[random() % ranks.size()]);
    const Mesh other(dense.axes(), ranks);
    bool same = true;
    for (const auto& name : dense.names())
      for (int rank : ranks) same = same && other.group(name, rank) == dense.group(name, rank);
    if (same) {
      ASSERT_NO_THROW(views.add("other", other));
    } else {
      ASSERT_ANY_THROW(views.add("other", other)) << dense << other;
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 10000);
}
