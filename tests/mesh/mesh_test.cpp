#include "tessera/mesh/mesh.h"

#include <gtest/gtest.h>

#include <numeric>

#include "refused.h"
#include "tessera/base/error.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/order.h"
#include "tessera/mesh/views.h"

using namespace tessera;
using Ranks = std::vector<int>;

TEST(Mesh, RowMajorGroups) {
  Mesh m({{"data", 2}, {"domain", 3}});
  EXPECT_TRUE(m.row_major());
  EXPECT_EQ(m.group("domain", 4), (Ranks{3, 4, 5}));
  EXPECT_EQ(m.group("data", 4), (Ranks{1, 4}));
  EXPECT_EQ(m.groups("data").lists(), (RankLists{{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(m.coordinate(4), (Ranks{1, 1}));
  EXPECT_EQ(m.to_string(),
            "data=2 x domain=3 (outermost first; adjacent ranks along domain), ranks 0..5");
}

TEST(Mesh, NothingIsSorted) {
  Mesh m({{"data", 2}, {"model", 2}}, {5, 0, 3, 1});
  EXPECT_FALSE(m.row_major());
  EXPECT_EQ(m.groups("model").lists(), (RankLists{{5, 0}, {3, 1}}));
  EXPECT_EQ(m.group("data", 1), (Ranks{0, 1}));
  // mesh order, whatever the order of the names
  EXPECT_EQ(m.group(std::vector<std::string>{"model", "data"}, 1), (Ranks{5, 0, 3, 1}));
  const int model[] = {1};
  EXPECT_EQ(m.group_rank(model, 5), 0);
  EXPECT_EQ(m.group_rank(model, 0), 1);
}

TEST(Mesh, EmptyAndScalar) {
  EXPECT_EQ(Mesh().size(), 0);
  EXPECT_FALSE(Mesh().contains(0));
  Mesh one(std::vector<Axis>{});
  EXPECT_EQ(one.size(), 1);
  EXPECT_EQ(one.group(std::vector<std::string>{}, 0), Ranks{0});
  EXPECT_NE(one, Mesh());
}

TEST(Mesh, SlicesAndReshapes) {
  Mesh m({{"pp", 2}, {"dp", 2}, {"tp", 2}});
  EXPECT_EQ(m.slice("dp", 1), Mesh({{"pp", 2}, {"tp", 2}}, {2, 3, 6, 7}));
  EXPECT_EQ(m.slice("tp", 1, 2), Mesh({{"pp", 2}, {"dp", 2}, {"tp", 1}}, {1, 3, 5, 7}));
  EXPECT_EQ(m.submesh({"tp", "pp"}, 3), Mesh({{"pp", 2}, {"tp", 2}}, {2, 3, 6, 7}));
  EXPECT_EQ(m.flatten({"tp", "dp"}, "x"), Mesh({{"pp", 2}, {"x", 4}}));
  EXPECT_EQ(m.flatten({"pp", "tp"}, "x"), Mesh({{"x", 4}, {"dp", 2}}, {0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(m.unflatten("tp", {{"a", 1}, {"b", 2}}).names(),
            (std::vector<std::string>{"pp", "dp", "a", "b"}));
  EXPECT_EQ(m.permute({"tp", "dp", "pp"}).ranks(), (Ranks{0, 4, 2, 6, 1, 5, 3, 7}));
  EXPECT_EQ(m.rename("tp", "tensor").names().back(), "tensor");
}

TEST(Mesh, BadInputIsRefusedWithTheNumbers) {
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 0}}); }), "size 0");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 2}, {"a", 2}}); }), "'a' is named twice");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 1 << 20}, {"b", 1 << 20}}); }),
              "at most 4194304 can be planned");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a\nrank 1=evil", 2}}); }), "control character");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 3}}, {0, 1}); }),
              "3 coordinates, but 2 ranks");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 3}}, {4, 1, 4}); }),
              "rank 4 is duplicated");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 3}}, {1000000, 4, 1000000}); }),
              "rank 1000000 is duplicated");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"a", 2}}, {3, -1}); }), "rank -1 is negative");
  Mesh m({{"a", 2}, {"b", 3}});
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.group("c", 0); }),
              "no axis 'c'; its axes are [a, b]");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.group("a", 6); }), "rank 6 is not in the mesh");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.slice("b", 3); }), "slice 3 of axis 'b' of size 3");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.slice("b", 2, 2); }), "[2, 2)");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.unflatten("b", {{"x", 2}, {"y", 2}}); }),
              "size 3 cannot be split into axes with product 4");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.permute({"a", "a"}); }), "must name each");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.flatten({}, "x"); }), "names no axes");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.view({{"x", 5}}); }),
              "5 coordinates, but the mesh has 6 ranks");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.rename("a", "b"); }), "named twice");
  const int bad[] = {0, 3};
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.rank_at(bad); }),
              "coordinate 3 on axis 'b' of size 3");
  const int outside[] = {1}, scope[] = {0};
  try {
    m.complement(outside, scope);
    FAIL();
  } catch (const OrthogonalityError& error) {
    EXPECT_EQ(error.ranks(), (Ranks{1, 2}));
  }
}

TEST(Mesh, AnOpenAxisTakesWhatTheOthersLeave) {
  std::vector<int> ranks(24);
  std::iota(ranks.begin(), ranks.end(), 0);
  for (const int a : {1, 2, 3, 4, 6, 8, 12, 24}) {
    EXPECT_EQ(Mesh({{"x", kOpenAxis}, {"y", a}}, ranks), Mesh({{"x", 24 / a}, {"y", a}}));
    EXPECT_EQ(Mesh({{"x", a}, {"y", kOpenAxis}}, ranks), Mesh({{"x", a}, {"y", 24 / a}}));
  }
  const Mesh m({{"a", 2}, {"b", 12}});
  EXPECT_EQ(m.view({{"x", 3}, {"y", kOpenAxis}}), Mesh({{"x", 3}, {"y", 8}}));
  EXPECT_EQ(m.unflatten("b", {{"x", kOpenAxis}, {"y", 4}}), Mesh({{"a", 2}, {"x", 3}, {"y", 4}}));
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.view({{"x", kOpenAxis}, {"y", kOpenAxis}}); }),
              "'x' and 'y' are both open");
  EXPECT_SAYS(refused<InvalidArgument>([&] { m.view({{"x", kOpenAxis}, {"y", 5}}); }),
              "24 ranks do not divide by 5");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"x", kOpenAxis}}); }), "decides an open axis");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"x", kOpenAxis}}, {}); }), "0 ranks");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh({{"x", -2}}); }), "size -2");
}

TEST(Order, ConvertsBothWays) {
  const auto mesh = mesh_from_order("tp-cp-dp", {{"tp", 2}, {"dp", 4}}, 8);
  EXPECT_EQ(mesh, Mesh({{"dp", 4}, {"cp", 1}, {"tp", 2}}));
  EXPECT_EQ(order_of(mesh), "tp-cp-dp");
}

TEST(Order, BadOrders) {
  EXPECT_SAYS(refused<RepeatedName>([] { split_order("tp-dp-tp"); }), "'tp' is duplicated");
  EXPECT_SAYS(refused<GroupConfigError>([] { split_order("tp--dp"); }), "empty name");
  EXPECT_SAYS(refused<GroupConfigError>([] { split_order(""); }), "empty name");
  EXPECT_SAYS(refused<UnknownName>([] { axes_from_order("tp-dp", {{"pp", 2}}); }),
              "'pp' has size 2");
  EXPECT_SAYS(
      refused<WorldSizeMismatch>([] { mesh_from_order("tp-dp", {{"tp", 2}, {"dp", 3}}, 8); }),
      "multiply to 6, but the world has 8");
  EXPECT_SAYS(refused<GroupConfigError>([] { order_of(Mesh({{"a-b", 2}})); }), "'a-b'");
}

TEST(Orthogonal, WorkedExample) {
  const Ranks dp0{0, 2, 4, 6, 8, 10, 12, 14};
  const RankLists shard{{0, 2, 4, 6}, {8, 10, 12, 14}}, right{{0, 8}, {2, 10}, {4, 12}, {6, 14}};
  EXPECT_NO_THROW(require_orthogonal(shard, "shard", right, "replicate", dp0, "dp"));
  const RankLists wrong{{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}};
  try {
    require_orthogonal(shard, "shard", wrong, "replicate", dp0, "dp");
    FAIL();
  } catch (const OrthogonalityError& error) {
    EXPECT_EQ(error.ranks(), (Ranks{1, 3, 5, 7, 9, 11, 13, 15}));
    EXPECT_SAYS(std::string(error.what()), "reach out of their scope");
  }
  try {  // the same through the scope family, which says in whose scope the group began
    RankLists all_shards = shard;
    all_shards.insert(all_shards.end(), {{1, 3, 5, 7}, {9, 11, 13, 15}});
    require_orthogonal(all_shards, "shard", wrong, "replicate",
                       RankLists{dp0, {1, 3, 5, 7, 9, 11, 13, 15}}, "dp");
    FAIL();
  } catch (const OrthogonalityError& error) {
    EXPECT_EQ(error.ranks(), (Ranks{1, 9}));
  }
}

TEST(Orthogonal, EachWayToBreakTheRule) {
  const Ranks scope{0, 1, 2, 3};
  const auto ranks_of = [&](const RankLists& a, const RankLists& b) -> Ranks {
    try {
      require_orthogonal(a, "a", b, "b", scope, "s");
    } catch (const OrthogonalityError& error) {
      return error.ranks();
    }
    return {};
  };
  EXPECT_EQ(ranks_of({{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}), Ranks{});
  EXPECT_EQ(ranks_of({{0, 1}, {2, 3}}, {{0, 1}, {2, 3}}), (Ranks{0, 1}));  // meet in two
  EXPECT_EQ(ranks_of({{0, 1}, {2}}, {{0, 2}, {1, 3}}), Ranks{3});          // not covered
  EXPECT_EQ(ranks_of({{0, 1}, {1, 2, 3}}, {{0, 2}, {1, 3}}), Ranks{1});    // overlap
  EXPECT_EQ(ranks_of({{0, 1}, {2, 3}}, {{0, 2}, {1, 3}, {9}}), Ranks{9});  // foreign
  EXPECT_EQ(ranks_of({{0, 1}, {2, 3}}, {{0, 2}, {1}, {3}}), Ranks{3});     // meet in none
}

TEST(Views, SharedAxesAreProvenEqual) {
  MeshViews views("dense", Mesh({{"data", 4}, {"tensor", 2}}));
  views.add("expert", {{"expert_data", 2}, {"expert", 2}, {"tensor", 2}});
  EXPECT_EQ(views.shared_axes(), std::vector<std::string>{"tensor"});
  EXPECT_EQ(views.group("expert", 5), (Ranks{5, 7}));
  EXPECT_EQ(views.group("tensor", 5), (Ranks{4, 5}));
  EXPECT_EQ(views.group("data", 5), (Ranks{1, 3, 5, 7}));
}

TEST(Views, WhatDisagreesIsRefused) {
  MeshViews views("dense", Mesh({{"data", 4}, {"tensor", 2}}));
  try {
    views.add("expert", {{"tensor", 2}, {"expert", 4}});  // tensor not adjacent any more
    FAIL();
  } catch (const ViewMismatch& error) {
    EXPECT_EQ(error.ranks(), (Ranks{1, 4}));
    EXPECT_SAYS(std::string(error.what()), "axis 'tensor' differs");
  }
  // order binds
  EXPECT_SAYS(refused<ViewMismatch>(
                  [&] { views.add("e", Mesh({{"data", 4}, {"t", 2}}, {0, 1, 4, 5, 2, 3, 6, 7})); }),
              "axis 'data'");
  EXPECT_SAYS(
      refused<ViewMismatch>([&] { views.add("e", Mesh({{"x", 8}}, {0, 1, 2, 3, 4, 5, 6, 9})); }),
      "lacks [7] and has [9]");
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { views.add("e", {{"x", 4}}); }), "4 coordinates");
  EXPECT_SAYS(refused<RepeatedName>([&] { views.add("dense", {{"x", 8}}); }), "'dense'");
  EXPECT_SAYS(refused<UnknownName>([&] { views.view("other"); }), "[dense]");
  EXPECT_SAYS(refused<UnknownName>([&] { views.group("other", 0); }), "dense.tensor");
  EXPECT_EQ(views.all().size(), 1u);
}
