#include "tessera/mesh/groups/group_config.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "random_mesh.h"
#include "refused.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/groups/group_plan.h"
#include "tessera/mesh/groups/model_groups.h"
#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/order.h"

using namespace tessera;
using Names = std::vector<std::string>;
using Ranks = std::vector<int>;

namespace {

/// world -> {mp 2, dp -> {shard 4, replicate 2}}
ProcessGroupConfig example() {
  ProcessGroupConfig config;
  config.add_node({.name = "mp", .size = 2}, "world");
  config.add_node({.name = "dp"}, "world");
  config.add_node({.name = "shard", .size = 4, .orthogonal_group = "across"}, "dp");
  config.add_node({.name = "replicate", .size = 2}, "dp");
  return config;
}

}  // namespace

TEST(GroupConfig, TheWorkedExample) {
  auto config = example();
  config.add_orthogonal({"across_world", {"shard"}, "world", {}});
  config.add_orthogonal({"not_dp", {"dp"}, "", {}});
  config.add_orthogonal({"of_set", {"mp", "replicate"}, "world", {}});
  const auto plan = GroupPlan::of_config(config, 16);
  EXPECT_EQ(plan.group("mp", 5), (Ranks{4, 5}));
  EXPECT_EQ(plan.group("shard", 0), (Ranks{0, 2, 4, 6}));
  EXPECT_EQ(plan.group("replicate", 9), (Ranks{1, 9}));
  EXPECT_EQ(plan.group("dp", 1), (Ranks{1, 3, 5, 7, 9, 11, 13, 15}));
  EXPECT_EQ(plan.group("across", 0), (Ranks{0, 8}));
  EXPECT_EQ(plan.group("across_world", 0), (Ranks{0, 1, 8, 9}));
  EXPECT_EQ(plan.group("not_dp", 3), (Ranks{2, 3}));
  EXPECT_EQ(plan.group("of_set", 0), (Ranks{0, 2, 4, 6}));
  EXPECT_EQ(plan.group_rank("across", 8), 1);
  EXPECT_EQ(plan.family("across").scope, "dp");
  EXPECT_EQ(plan.memberships(11).size(), 9u);
}

TEST(GroupConfig, LookUpAndPrint) {
  auto config = example();
  EXPECT_EQ(config.leaf_groups(), (Names{"mp", "shard", "replicate"}));
  EXPECT_EQ(config.leaf_groups("dp"), (Names{"shard", "replicate"}));
  EXPECT_EQ(config.ancestors("shard"), (Names{"dp", "world"}));
  EXPECT_EQ(config.size("dp"), 8);
  EXPECT_EQ(config.node("shard").orthogonal_group, "across");
  config.set_options("mp", {"nccl", std::chrono::milliseconds(500)});
  EXPECT_EQ(config.to_string(),
            "world 16\n"
            "|- mp 2, backend nccl, timeout 500 ms\n"
            "`- dp 8\n"
            "   |- shard 4, orthogonal across in dp\n"
            "   `- replicate 2\n"
            "order mp-shard-replicate (first = adjacent ranks)\n");
}

TEST(GroupConfig, SettingSizesUpdatesParents) {
  auto config = example();
  config.set_leaf_group_sizes({{"shard", 8}, {"replicate", 3}});
  EXPECT_EQ(config.node("dp").size, 24);
  EXPECT_EQ(config.node("world").size, 48);
  config.set_leaf_group_sizes({{"shard", 2}}, false);
  EXPECT_EQ(config.node("dp").size, 24);  // left as they were, and therefore found out:
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { config.resolve(12); }), "'world' says size 48");
  EXPECT_SAYS(
      refused<GroupConfigError>([&] { config.set_leaf_group_sizes({{"mp", 4}, {"shard", 0}}); }),
      "'shard' has size 0");
  EXPECT_EQ(config.node("mp").size, 2);  // all or nothing
  EXPECT_SAYS(refused<UnknownName>([&] { config.set_leaf_group_sizes({{"tp", 4}}); }),
              "[mp, shard, replicate]");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.set_leaf_group_sizes({{"dp", 4}}); }),
              "'dp' is not a leaf");
}

TEST(GroupConfig, OneOpenLeafFollowsFromTheWorld) {
  ProcessGroupConfig config;
  config.add_node({.name = "mp", .size = 2}, "world");
  config.add_node({.name = "dp"}, "world");
  EXPECT_EQ(config.resolve(16).node("dp").size, 8);
  EXPECT_EQ(config.resolve(16).node("world").size, 16);
  EXPECT_EQ(config.node("dp").size, std::nullopt);
  const auto text = refused<WorldSizeMismatch>([&] { config.resolve(15); });
  EXPECT_SAYS(text, "15 ranks do not divide by the product 2");
  config.add_node({.name = "pp"}, "world");
  EXPECT_SAYS(refused<UnsetSize>([&] { config.resolve(16); }), "[dp, pp]");
}

TEST(GroupConfig, OrderIsTheUsersChoice) {
  auto config = example();
  EXPECT_EQ(config.closeness(), (Names{"mp", "shard", "replicate"}));
  config.set_order("world", "last-adjacent");
  EXPECT_EQ(config.closeness(), (Names{"replicate", "shard", "mp"}));
  config.set_order("dp", "first-adjacent");
  EXPECT_EQ(config.closeness(), (Names{"shard", "replicate", "mp"}));
  config.set_order("world", "dp-mp");
  config.set_order("dp", "replicate-shard");
  EXPECT_EQ(config.closeness(), (Names{"replicate", "shard", "mp"}));
  config.set_order("world", "shard-mp-replicate");
  EXPECT_EQ(config.closeness(), (Names{"shard", "mp", "replicate"}));
  EXPECT_EQ(config.mesh(16), Mesh({{"replicate", 2}, {"mp", 2}, {"shard", 4}}));
  EXPECT_EQ(GroupPlan::of_config(config, 16).group("shard", 0), (Ranks{0, 1, 2, 3}));
  config.set_order("world", "shard-mp");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.closeness(); }), "[mp, dp]");
}

TEST(GroupConfig, AnyRanks) {
  const auto plan =
      GroupPlan::of_config(example(), Ranks{30, 31, 20, 21, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(plan.group("shard", 20), (Ranks{30, 20, 10, 0}));
  EXPECT_EQ(plan.group("across", 31), (Ranks{31, 3}));
}

TEST(GroupConfig, TreesThatAreNone) {
  auto config = example();
  EXPECT_SAYS(refused<RepeatedName>([&] { config.add_node({.name = "shard"}, "mp"); }), "'shard'");
  EXPECT_SAYS(refused<UnknownName>([&] { config.add_node({.name = "x"}, "nowhere"); }),
              "'nowhere'");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.add_node({.name = "x", .size = -2}, "dp"); }),
              "size -2");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.add_node({.name = "world"}, "dp"); }),
              "only the root");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.add_node({.name = "parent"}, "dp"); }),
              "reserved");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.add_node({.name = ""}, "dp"); }),
              "empty name");
  EXPECT_SAYS(refused<UnknownName>([&] { config.node("tp"); }),
              "[world, mp, dp, shard, replicate]");
  using Nodes = std::vector<std::pair<ProcessGroupNode, std::string>>;
  const auto node = [](const char* name) { return ProcessGroupNode{.name = name, .size = 2}; };
  EXPECT_SAYS(refused<GroupCycle>([&] {
                ProcessGroupConfig::from_nodes(
                    Nodes{{node("w"), ""}, {node("a"), "b"}, {node("b"), "c"}, {node("c"), "a"}});
              }),
              "form a cycle");
  EXPECT_SAYS(refused<GroupCycle>([&] {
                ProcessGroupConfig::from_nodes(Nodes{{node("w"), ""}, {node("a"), "a"}});
              }),
              "[a, a]");
  EXPECT_SAYS(refused<UnknownName>([&] {
                ProcessGroupConfig::from_nodes(Nodes{{node("w"), ""}, {node("a"), "b"}});
              }),
              "parent 'b'");
  EXPECT_SAYS(
      refused<RepeatedName>([&] {
        ProcessGroupConfig::from_nodes(Nodes{{node("w"), ""}, {node("a"), "w"}, {node("a"), "w"}});
      }),
      "'a'");
  EXPECT_SAYS(refused<GroupConfigError>(
                  [&] { ProcessGroupConfig::from_nodes(Nodes{{node("w"), ""}, {node("v"), ""}}); }),
              "2 nodes have no parent");
  EXPECT_SAYS(refused<GroupConfigError>([&] { ProcessGroupConfig::from_nodes(Nodes{}); }),
              "0 nodes have no parent");
  const auto any_order = ProcessGroupConfig::from_nodes(
      Nodes{{node("c"), "b"}, {node("d"), "w"}, {node("b"), "w"}, {{.name = "w"}, ""}});
  EXPECT_EQ(any_order.node_names(), (Names{"w", "d", "b", "c"}));
}

TEST(GroupConfig, WorldsThatDoNotFit) {
  auto config = example();
  try {
    config.resolve(24);
    FAIL();
  } catch (const WorldSizeMismatch& error) {
    EXPECT_EQ(error.world_size(), 24);
    EXPECT_EQ(error.product(), 16);
    EXPECT_SAYS(error.what(),
                "[mp = 2, shard = 4, replicate = 2] multiply to 16, but the world has 24");
  }
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.resolve(0); }), "a world of 0 ranks");
  config.set_leaf_group_sizes({{"mp", 1 << 15}, {"shard", 1 << 15}}, false);
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { config.resolve(16); }), "multiply to more than");
}

TEST(GroupConfig, OrthogonalGroupsThatBreakTheRule) {
  const auto ranks_of = [](OrthogonalGroup group, const std::string& says) {
    auto config = example();
    config.add_orthogonal(std::move(group));
    try {
      GroupPlan::of_config(config, 16);
    } catch (const OrthogonalityError& error) {
      EXPECT_SAYS(error.what(), says);
      return error.ranks();
    }
    ADD_FAILURE() << "accepted";
    return Ranks{};
  };
  EXPECT_EQ(ranks_of({"x", {"world"}, "", {}}, "the root has no orthogonal groups").size(), 16u);
  EXPECT_EQ(ranks_of({"x", {"shard"}, "mp", {}}, "does not hold it"), (Ranks{2, 4, 6}));
  EXPECT_EQ(ranks_of({"x", {"dp", "shard"}, "world", {}}, "one is inside the other"),
            (Ranks{0, 2, 4, 6}));
  EXPECT_EQ(ranks_of({"x", {"shard", "replicate"}, "parent", {}}, "fills it"),
            (Ranks{0, 2, 4, 6, 8, 10, 12, 14}));
  auto config = example();
  config.add_orthogonal({"x", {"tp"}, "", {}});
  EXPECT_SAYS(refused<UnknownName>([&] { GroupPlan::of_config(config, 16); }), "'tp'");
  auto repeated = example();
  repeated.add_orthogonal({"dp", {"mp"}, "", {}});
  EXPECT_SAYS(refused<RepeatedName>([&] { GroupPlan::of_config(repeated, 16); }), "'dp'");
  EXPECT_SAYS(refused<GroupConfigError>([&] { config.add_orthogonal({"y", {}, "", {}}); }),
              "names no node");
  auto root = example();
  root.set_orthogonal("world", "outside");
  EXPECT_SAYS(refused<OrthogonalityError>([&] { GroupPlan::of_config(root, 16); }), "root");
}

namespace {

/// model_parallel -> {spatial -> {h 2, w 2}, matmul 2}, orthogonal to data_parallel
ProcessGroupConfig model_as_root(const std::string& orthogonal_group) {
  ProcessGroupConfig config({.name = "model_parallel", .orthogonal_group = orthogonal_group});
  config.add_node({.name = "spatial"}, "model_parallel");
  config.add_node({.name = "h", .size = 2}, "spatial");
  config.add_node({.name = "w", .size = 2}, "spatial");
  config.add_node({.name = "matmul", .size = 2}, "model_parallel");
  return config;
}

}  // namespace

TEST(GroupConfig, AModelAsTheRootInsideALargerWorld) {
  // The tree that the model's means, written out.
  ProcessGroupConfig written;
  written.add_node({.name = "model_parallel"}, "world");
  written.add_node({.name = "spatial"}, "model_parallel");
  written.add_node({.name = "h", .size = 2}, "spatial");
  written.add_node({.name = "w", .size = 2}, "spatial");
  written.add_node({.name = "matmul", .size = 2}, "model_parallel");
  written.add_node({.name = "data_parallel"}, "world");
  const auto config = model_as_root("data_parallel");
  for (const int replicas : {1, 2, 3, 5}) {
    const int world = 8 * replicas;
    const auto plan = GroupPlan::of_config(config, world);
    EXPECT_EQ(plan.canonical(), GroupPlan::of_config(written, world).canonical());
    EXPECT_EQ(config.resolve(world), written.resolve(world));
    EXPECT_EQ(plan.group("model_parallel", 3), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(plan.group_size("data_parallel"), replicas);
    EXPECT_NO_THROW(require_orthogonal(plan.groups("model_parallel").lists(), "model",
                                       plan.groups("data_parallel").lists(), "data",
                                       plan.mesh().ranks(), "world"));
  }
  EXPECT_EQ(GroupPlan::of_config(config, 16).group("data_parallel", 5), (Ranks{5, 13}));
  EXPECT_SAYS(config.to_string(), "model_parallel 8, orthogonal data_parallel in world\n");
  // Over ranks of one's own, in their order.
  Ranks back(16);
  std::iota(back.rbegin(), back.rend(), 0);
  EXPECT_EQ(GroupPlan::of_config(config, back).group("data_parallel", 15), (Ranks{15, 7}));
  // The groups outside the root named apart from it, with options, and a second name for them.
  auto apart = model_as_root("");
  apart.add_orthogonal({"replicas", {"model_parallel"}, "world", {"mpi", {}}});
  apart.add_orthogonal({"again", {"model_parallel"}, "", {}});
  EXPECT_TRUE(apart.inside_a_world());
  EXPECT_SAYS(apart.to_string(), "orthogonal replicas of [model_parallel] in world");
  const auto plan = GroupPlan::of_config(apart, 24);
  EXPECT_EQ(plan.group("replicas", 0), (Ranks{0, 8, 16}));
  EXPECT_EQ(plan.group("again", 0), (Ranks{0, 8, 16}));
  EXPECT_EQ(plan.family("replicas").options.backend, "mpi");
  // A root that is a leaf.
  ProcessGroupConfig leaf({.name = "tensor", .size = 2, .orthogonal_group = "data"});
  EXPECT_EQ(GroupPlan::of_config(leaf, 6).group("data", 1), (Ranks{1, 3, 5}));
}

TEST(GroupConfig, AModelAsTheRootThatDoesNotFit) {
  const auto named = model_as_root("data_parallel");
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { GroupPlan::of_config(named, 12); }),
              "12 ranks do not divide by the product 8");
  auto open = named;
  open.add_node({.name = "more"}, "model_parallel");
  EXPECT_SAYS(refused<UnsetSize>([&] { open.resolve(16); }), "[more, data_parallel]");
  // Without the name of what is outside: the answer is the tree to write.
  const auto unnamed = model_as_root("");
  EXPECT_FALSE(unnamed.inside_a_world());
  const auto answer = refused<WorldSizeMismatch>([&] { GroupPlan::of_config(unnamed, 16); });
  EXPECT_SAYS(answer, "multiply to 8, but the world has 16 ranks");
  EXPECT_SAYS(answer, "`orthogonal_group: data_parallel`");
  EXPECT_SAYS(answer,
              "world 16\n"
              "|- model_parallel 8\n"
              "|  |- spatial 4\n"
              "|  |  |- h 2\n"
              "|  |  `- w 2\n"
              "|  `- matmul 2\n"
              "`- data_parallel 2\n");
  auto taken = model_as_root("");
  taken.set_orthogonal("matmul", "data_parallel");
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { taken.resolve(16); }), "give its root an");
  ProcessGroupConfig world;
  world.add_node({.name = "mp", .size = 4}, "world");
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { world.resolve(8); }), "add an open leaf");
  EXPECT_SAYS(refused<GroupConfigError>([&] { world.inside_world(); }), "nothing is outside");
  auto scoped = model_as_root("");
  scoped.set_orthogonal("model_parallel", "data", "spatial");
  EXPECT_SAYS(refused<OrthogonalityError>([&] { scoped.resolve(16); }), "does not hold it");
  auto twice = model_as_root("matmul");
  EXPECT_SAYS(refused<RepeatedName>([&] { twice.resolve(16); }), "'matmul'");
}

namespace {

struct SaysGroups {
  static ProcessGroupConfig process_groups() { return model_as_root("data"); }
};
struct SaysByWidth {
  static ProcessGroupConfig process_groups(int width) {
    ProcessGroupConfig config({.name = "layer", .orthogonal_group = "data"});
    config.add_node({.name = "tensor", .size = width > 100 ? 4 : 2}, "layer");
    return config;
  }
};
struct Holder {
  using Impl = SaysByWidth;
};
struct SaysNothing {};

static_assert(SaysProcessGroups<SaysGroups> && !SaysProcessGroups<SaysGroups, int>);
static_assert(SaysProcessGroups<Holder, int> && !SaysProcessGroups<Holder>);
static_assert(!SaysProcessGroups<SaysNothing>);

}  // namespace

TEST(GroupConfig, AModelSaysWhatItNeeds) {
  EXPECT_EQ(process_groups_of<SaysGroups>(), model_as_root("data"));
  EXPECT_EQ(process_groups_of<Holder>(200).size("tensor"), 4);
  EXPECT_EQ(process_groups_of<SaysByWidth>(7).size("tensor"), 2);
  EXPECT_EQ(process_groups_of<SaysByWidth>({{"tensor", 3}}, 7).size("layer"), 3);
  const auto wide = process_groups_of<SaysGroups>({{"h", 3}});
  EXPECT_EQ(GroupPlan::of_config(wide, 24).group("data", 1), (Ranks{1, 13}));
  EXPECT_SAYS(refused<UnknownName>([] { process_groups_of<SaysGroups>({{"g", 3}}); }), "'g'");
}

TEST(GroupConfig, RandomTreesObeyTheRule) {
  std::mt19937 random(7);
  int orthogonal = 0;
  for (int n = 0; n < 3000; ++n) {
    ProcessGroupConfig config;
    int world = 1;
    Names nodes{"world"};
    for (int i = pick(random, 1, 7); i > 0; --i) {
      const std::string above = nodes[random() % nodes.size()];
      nodes.push_back(std::string(1, static_cast<char>('a' + nodes.size())));
      config.add_node({.name = nodes.back()}, above);
    }
    std::map<std::string, int> sizes;
    for (const auto& leaf : config.leaf_groups()) {
      sizes[leaf] = world >= 100 ? 1 : pick(random, 1, 4);
      world *= sizes[leaf];
    }
    sizes.erase(config.leaf_groups()[random() % sizes.size()]);  // left open
    config.set_leaf_group_sizes(sizes);
    if (random() % 2) config.set_order("world", "last-adjacent");
    for (const auto& name : nodes) {
      if (name == "world") continue;
      const auto above = config.ancestors(name);
      config.set_orthogonal(name, "o_" + name, above[random() % above.size()]);
      // One child alone fills its parent; the world may be filled too.
      const auto scope = config.node(name).scope;
      if (config.leaf_groups(scope).size() == config.leaf_groups(name).size()) {
        EXPECT_SAYS(refused<OrthogonalityError>([&] { GroupPlan::of_config(config, world); }),
                    "fills it");
        config.set_orthogonal(name, "");
      }
    }
    Ranks ranks(world);
    std::iota(ranks.begin(), ranks.end(), 0);
    shuffle(ranks, random);
    const auto plan = GroupPlan::of_config(config, ranks);
    for (const auto& name : nodes)
      ASSERT_NO_THROW(require_partition(plan.groups(name).lists(), ranks, name));
    for (const auto& family : plan.families()) {
      if (family.kind != GroupFamily::Kind::orthogonal) continue;
      ASSERT_NO_THROW(require_orthogonal(plan.groups(family.of.front()).lists(), "of",
                                         plan.groups(family.name).lists(), family.name,
                                         plan.groups(family.scope).lists(), family.scope));
      ++orthogonal;
    }
    for (int rank : {ranks.front(), ranks.back()})
      for (const auto& mine : plan.memberships(rank)) ASSERT_EQ(mine.ranks[mine.group_rank], rank);
  }
  EXPECT_GT(orthogonal, 3000);
}

TEST(GroupPlan, CanonicalTextAndItsDifference) {
  const auto a = GroupPlan::of_config(example(), 16), same = GroupPlan::of_config(example(), 16);
  EXPECT_EQ(a.hash(), same.hash());
  EXPECT_EQ(first_difference(a.canonical(), same.canonical()), std::nullopt);
  auto config = example();
  config.set_options("shard", {"mpi", {}});
  const auto b = GroupPlan::of_config(config, 16);
  EXPECT_NE(a.hash(), b.hash());
  const auto difference = first_difference(a.canonical(), b.canonical());
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->line, 5);
  EXPECT_SAYS(difference->mine,
              "groups shard (leaf): 4 ranks, view world, axes shard=4:2, backend default");
  EXPECT_SAYS(difference->theirs, "backend mpi");
  // The table alone, beyond what the line lists, and a missing line.
  Ranks ranks(64);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::swap(ranks[0], ranks[1]);
  const auto c = GroupPlan::of_mesh(Mesh({{"x", 64}}, ranks));
  std::swap(ranks[60], ranks[61]);
  const auto d = GroupPlan::of_mesh(Mesh({{"x", 64}}, ranks));
  EXPECT_EQ(first_difference(c.canonical(), d.canonical())->line, 1);
  EXPECT_EQ(first_difference("a\nb\n", "a\n")->line, 2);
  EXPECT_EQ(first_difference("a\nb\n", "a\n")->theirs, "");
  EXPECT_EQ(first_difference("a\nb", "a\nb\n")->line, 3);
}

TEST(GroupPlan, ViewsAndAxisSets) {
  MeshViews views("dense", Mesh({{"data", 4}, {"tensor", 2}}));
  views.add("expert", {{"expert_data", 2}, {"expert", 2}, {"tensor", 2}});
  GroupPlan plan(views);
  plan.add_axes("tensor-data");
  EXPECT_EQ(plan.families().size(), 5u);
  EXPECT_EQ(plan.group("expert", 0), (Ranks{0, 2}));
  EXPECT_EQ(plan.group("tensor-data", 3).size(), 8u);
  EXPECT_SAYS(refused<RepeatedName>(
                  [&] { plan.add({"data", GroupFamily::Kind::axes, 0, {0}, {}, {}, ""}); }),
              "'data'");
  EXPECT_SAYS(refused<UnknownName>([&] { plan.add_axes("tensor-x"); }), "'x'");
  EXPECT_SAYS(refused<UnknownName>([&] { plan.group("y", 0); }), "'y'");
}

TEST(Parallelism, ThreeWaysOnEightRanks) {
  const auto mesh = parallel_mesh(8, 2, 2);
  EXPECT_EQ(mesh.groups("mp").lists(), (RankLists{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(mesh.groups("pp").lists(), (RankLists{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(mesh.groups("dp").lists(), (RankLists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_SAYS(refused<WorldSizeMismatch>([] { parallel_mesh(8, 3, 2); }),
              "2 ranks would be left over");
  EXPECT_SAYS(refused<GroupConfigError>([] { parallel_mesh(8, 0, 2); }), "at least 1");
}
