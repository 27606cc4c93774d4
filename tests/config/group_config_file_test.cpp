#include "tessera/config/group_config_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "random_mesh.h"
#include "refused.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/groups/group_plan.h"

using namespace tessera;

namespace {

constexpr const char* kNested = R"(
name: world
order: first-adjacent
children:
  - {name: mp, size: 2, backend: nccl, timeout: 30s}
  - name: dp
    children:
      - {name: shard, size: 4, orthogonal_group: across, scope: parent}
      - {name: replicate}
orthogonal:
  - {name: not_dp, of: [dp], scope: world, timeout: 1min}
)";

constexpr const char* kFlat = R"({
 "tree": {"dp": ["shard", "replicate"], "world": ["mp", "dp"]},
 "leaf_sizes": {"mp": 2, "shard": 4, "replicate": null},
 "order": "first-adjacent",
 "nodes": {"shard": {"orthogonal_group": "across", "scope": "parent"},
            "mp": {"backend": "nccl", "timeout": 30000}},
 "orthogonal": [{"name": "not_dp", "of": ["dp"], "scope": "world", "timeout": "60s"}]
})";

ProcessGroupConfig yaml(const std::string& text) {
  return parse_group_config(text, FileFormat::yaml, "job.yaml");
}
ProcessGroupConfig json(const std::string& text) {
  return parse_group_config(text, FileFormat::json, "job.json");
}

}  // namespace

TEST(GroupConfigFile, BothFormsAndFormatsSayTheSame) {
  const auto nested = yaml(kNested), flat = json(kFlat);
  EXPECT_EQ(nested, flat) << nested.to_string() << flat.to_string();
  EXPECT_EQ(nested.node("mp").options.backend, "nccl");
  EXPECT_EQ(nested.node("mp").options.timeout, std::chrono::seconds(30));
  EXPECT_EQ(GroupPlan::of_config(nested, 16).group("across", 0), (std::vector<int>{0, 8}));
  for (const auto format : {FileFormat::json, FileFormat::yaml})
    EXPECT_EQ(parse_group_config(format_group_config(nested, format), format), nested);
}

TEST(GroupConfigFile, Files) {
  const std::string folder = concat(::testing::TempDir(), "tessera_", ::getpid(), "_");
  for (const char* name : {"groups.json", "groups.yaml", "groups.yml"}) {
    write_group_config(yaml(kNested), folder + name);
    EXPECT_EQ(read_group_config(folder + name), yaml(kNested));
    std::remove((folder + name).c_str());
  }
  EXPECT_SAYS(refused<ConfigFileError>([&] { read_group_config(folder + "missing.json"); }),
              "cannot be read");
  EXPECT_SAYS(
      refused<ConfigFileError>([&] { write_group_config(yaml(kNested), folder + "groups.txt"); }),
      "must end in .json");
  EXPECT_SAYS(refused<ConfigFileError>(
                  [&] { write_group_config(yaml(kNested), folder + "no/such/folder.json"); }),
              "cannot be written");
}

TEST(GroupConfigFile, RandomTreesRoundTrip) {
  std::mt19937 random(11);
  for (int n = 0; n < 500; ++n) {
    ProcessGroupConfig config({.name = random() % 2 ? "world" : "all ranks"});
    std::vector<std::string> nodes{config.root().name};
    // Names that YAML would take for something else must come back as they were.
    const std::vector<std::string> names{"true", "12",  "1.5",   "~",     "null", "a: b",
                                         "x#y",  "'q'", "\"q\"", "- z",   "{",    "no",
                                         "tp",   "ü",   " lead", "--- x", "... x"};
    const std::vector<std::string> orders{"last-adjacent", "end\r",  "a\rb",
                                          "a\tb",          "line\n", std::string("f\0r", 3)};
    for (int i = pick(random, 1, 9); i > 0; --i) {
      ProcessGroupNode node{.name = names[random() % names.size()]};
      if (config.contains(node.name)) continue;
      if (random() % 2) node.size = pick(random, 1, 9);
      if (random() % 3 == 0)
        node.options = {"gloo", std::chrono::milliseconds(pick(random, 1, 100000))};
      if (random() % 3 == 0) node.orthogonal_group = "o" + node.name;
      if (!node.orthogonal_group.empty() && random() % 2) node.scope = "world";
      if (random() % 4 == 0) node.order = orders[random() % orders.size()];
      const std::string above = nodes[random() % nodes.size()];
      config.add_node(node, above);
      nodes.push_back(node.name);
    }
    if (random() % 2)
      config.add_orthogonal({"set", {nodes.back()}, "world", {"", std::chrono::milliseconds(7)}});
    for (const auto format : {FileFormat::json, FileFormat::yaml}) {
      const auto text = format_group_config(config, format);
      ASSERT_EQ(parse_group_config(text, format), config) << text;
    }
  }
}

TEST(GroupConfigFile, NamesThatYamlWouldChangeAreNotWritten) {
  const auto config = ProcessGroupConfig({.name = "\uFDD0: "});
  EXPECT_EQ(json(format_group_config(config, FileFormat::json)), config);
  EXPECT_SAYS(refused<InvalidArgument>([&] { format_group_config(config, FileFormat::yaml); }),
              "write JSON");
  const ProcessGroupConfig bytes({.name = "w", .order = "\xff"});
  for (const auto format : {FileFormat::json, FileFormat::yaml})
    EXPECT_SAYS(refused<InvalidArgument>([&] { format_group_config(bytes, format); }), "UTF-8");
}

TEST(GroupConfigFile, WhatIsWrongIsNamedWithItsPlace) {
  EXPECT_SAYS(refused<ConfigFileError>([] { json("{\"name\": "); }), "job.json: ");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: world\nchildren: [a"); }), "job.yaml:");
  EXPECT_SAYS(refused<ConfigFileError>([] { json(R"({"name": "w", "name": "v"})"); }),
              "'name' is duplicated");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nsize: 2\nsize: 3"); }),
              "job.yaml:3: the key 'size' is duplicated");
  for (const char control : {'\0', '\4', '\33'})
    EXPECT_SAYS(refused<ConfigFileError>([&] { yaml(concat("name: w\norder: f0", control, "r")); }),
                concat("job.yaml:2: byte ", static_cast<int>(control), " is a control character"));
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: [{name: a, sise: 2}]"); }),
              "children[0].sise: is not a field here");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: [{name: a, size: two}]"); }),
              "children[0].size: must be a whole number");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: [{name: a, size: 2.5}]"); }),
              "2.5");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: [{size: 2}]"); }),
              "children[0].name: is missing");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: {a: 2}"); }),
              "children: must be a list");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nchildren: [a]"); }),
              "must be an object");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\ntimeout: 3 weeks"); }),
              "unknown unit 'weeks'");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\ntimeout: 0"); }),
              "from 1 ms to 10 years");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\ntimeout: 1e15"); }), "to 10 years");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("name: w\nscope: world"); }),
              "'orthogonal_group' is not given");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("&a {name: w, children: [*a]}"); }),
              "nested deeper than");
  EXPECT_SAYS(refused<ConfigFileError>([] { json(R"({"tree": {"w": ["a"], "a": "b"}})"); }),
              "tree.a: must be a list of texts");
  EXPECT_SAYS(
      refused<ConfigFileError>([] { json(R"({"tree": {"w": ["a"]}, "leaf_sizes": {"w": 4}})"); }),
      "leaf_sizes.w: is not a leaf");
  EXPECT_SAYS(
      refused<UnknownName>([] { json(R"({"tree": {"w": ["a"]}, "leaf_sizes": {"b": 4}})"); }),
      "'b'");
  EXPECT_SAYS(
      refused<GroupCycle>([] { json(R"({"tree": {"w": ["x"], "a": ["b"], "b": ["a"]}})"); }),
      "cycle");
  EXPECT_SAYS(refused<RepeatedName>([] { json(R"({"tree": {"w": ["a", "a"]}})"); }), "'a'");
  EXPECT_SAYS(refused<RepeatedName>([] { yaml("name: w\nchildren: [{name: a}, {name: a}]"); }),
              "'a'");
  EXPECT_SAYS(refused<GroupConfigError>([] { yaml("name: w\nchildren: [{name: a, size: 0}]"); }),
              "size 0");
}
