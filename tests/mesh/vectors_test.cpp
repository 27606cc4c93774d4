// The rank lists of data/groups.json. Inside a list the order binds; the order of the lists among
// themselves does not.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/mesh/groups/group_plan.h"
#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/order.h"

using namespace tessera;
using Json = nlohmann::json;

namespace {

Json vectors() {
  std::ifstream file(TESSERA_TEST_DATA "/groups.json");
  return Json::parse(file);
}

std::set<std::vector<int>> as_set(const RankLists& lists) { return {lists.begin(), lists.end()}; }

void expect_groups(const GroupTable& groups, const Json& lists, const std::string& what) {
  EXPECT_EQ(as_set(groups.lists()), as_set(lists.get<RankLists>())) << what;
  EXPECT_EQ(groups.count(), static_cast<int>(lists.size())) << what;
}

std::map<std::string, int> sizes_of(const Json& config, const std::string& order) {
  std::map<std::string, int> sizes;
  for (const auto& axis : split_order(order))
    if (config.contains(axis)) sizes[axis] = config[axis].get<int>();
  return sizes;
}

ProcessGroupConfig tree_of(const Json& entry) {
  ProcessGroupConfig config;
  const auto add = [&](auto&& self, const std::string& above) -> void {
    if (!entry["tree"].contains(above)) return;
    for (const auto& child : entry["tree"][above]) {
      config.add_node({.name = child}, above);
      self(self, child);
    }
  };
  add(add, "world");
  config.set_leaf_group_sizes(entry["leaf_sizes"].get<std::map<std::string, int>>());
  return config;
}

}  // namespace

TEST(Vectors, ModelPipelineData) {
  const Json v = vectors()["model_pipeline_data_8"];
  const auto mesh = parallel_mesh(v["world"], v["model_parallelism"], v["pipeline_parallelism"]);
  expect_groups(mesh.groups("mp"), v["model"], "model");
  expect_groups(mesh.groups("pp"), v["pipeline"], "pipeline");
  expect_groups(mesh.groups("dp"), v["data"], "data");
}

TEST(Vectors, NamedOrders) {
  int groups = 0;
  const Json all = vectors()["order_first_axis_adjacent"];
  EXPECT_FALSE(all.empty());
  for (const Json& v : all) {
    const std::string order = v["config"]["order"];
    auto plan = GroupPlan::of_mesh(
        mesh_from_order(order, sizes_of(v["config"], order), v["world"].get<int>()));
    EXPECT_EQ(order_of(plan.mesh()), order);
    for (const auto& [name, lists] : v["groups"].items()) {
      plan.add_axes(name);
      expect_groups(plan.groups(name), lists, order + " " + name);
      ++groups;
    }
  }
  EXPECT_EQ(groups, 36);
}

TEST(Vectors, RowMajor) {
  const Json v = vectors()["rows_last_axis_adjacent"]["pipe-data-model[2, 2, 2]"];
  const Mesh mesh({{"pipe", 2}, {"data", 2}, {"model", 2}});
  for (const auto& [name, lists] : v.items()) expect_groups(mesh.groups(name), lists, name);
}

TEST(Vectors, Tree) {
  const Json all = vectors()["tree"];
  EXPECT_FALSE(all.empty());
  for (const Json& v : all) {
    const auto plan = GroupPlan::of_config(tree_of(v), v["world"].get<int>());
    for (const auto& [name, lists] : v["groups"].items())
      expect_groups(plan.groups(name), lists, name);
  }
}

TEST(Vectors, NestedOrthogonal) {
  const Json v = vectors()["tree_nested_orthogonal_16"];
  auto config = tree_of(v);
  config.add_orthogonal({"orthogonal to shard, in its parent dp", {"shard"}, "", {}});
  config.add_orthogonal({"orthogonal to shard, in the world", {"shard"}, "world", {}});
  const auto plan = GroupPlan::of_config(config, v["world"].get<int>());
  for (const auto& [name, lists] : v["groups"].items())
    expect_groups(plan.groups(name), lists, name);
}

TEST(Vectors, Hierarchical) {
  const Json v = vectors()["hierarchical_16"];
  const auto mesh = mesh_from_order("L0-L1-L2", {{"L0", 2}, {"L1", 2}, {"L2", 4}}, 16);
  for (const auto& [name, lists] : v.items()) expect_groups(mesh.groups(name), lists, name);
}
