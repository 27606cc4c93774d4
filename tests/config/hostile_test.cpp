// Files and texts that were made to break their readers: each is refused by a typed error, quickly.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <clocale>

#include "refused.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"
#include "tessera/config/group_config_file.h"
#include "tessera/config/internal/plan_request.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

ProcessGroupConfig group_config(const std::string& text, FileFormat format) {
  return parse_group_config(text, format, "job");
}

TEST(Hostile, DeepDocuments) {
  const int deep = 200'000;
  EXPECT_SAYS(refused<ConfigFileError>([&] {
                group_config("{\"name\": " + repeated("[", deep) + repeated("]", deep) + "}",
                             FileFormat::json);
              }),
              "nested deeper than 400");
  EXPECT_SAYS(refused<ConfigFileError>([&] {
                group_config(
                    repeated("{\"name\": \"a\", \"children\": [", 30'000) + repeated("]}", 30'000),
                    FileFormat::json);
              }),
              "nested deeper than 400");
  refused<ConfigFileError>([&] { group_config("name: " + repeated("[", deep), FileFormat::yaml); });
}

TEST(Hostile, AliasesThatMultiply) {
  std::string text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n";
  for (int level = 1; level < 10; ++level) {
    const std::string below = concat("*a", level - 1);
    text += concat("a", level, ": &a", level, " [", below, repeated(", " + below, 8), "]\n");
  }
  EXPECT_SAYS(refused<ConfigFileError>([&] { group_config(text, FileFormat::yaml); }),
              "more than 4000000 values");
}

TEST(Hostile, ManyKeysOfOneObject) {
  std::string text = "{\"name\": \"w\"";
  for (int i = 0; i < 100'000; ++i) text += concat(", \"k", i, "\": 1");
  EXPECT_SAYS(refused<ConfigFileError>([&] { group_config(text + "}", FileFormat::json); }),
              "more than 20000 keys");
}

TEST(Hostile, LongScalarsAndMessagesThatStayShort) {
  const std::string digits = repeated("7", 300'000);
  for (const char* prefix : {"size: ", "size: 1.", "size: -", "timeout: "})
    EXPECT_LT(refused<ConfigurationError>([&] {
                const auto config = group_config("name: w\n" + (prefix + digits), FileFormat::yaml);
                config.mesh(4);
              }).size(),
              2000u)
        << prefix;
  EXPECT_LT(refused<ConfigFileError>([&] {
              group_config("{\"name\": " + ("[" + repeated("1, ", 100'000) + "1]}"),
                           FileFormat::json);
            }).size(),
            2000u);
}

TEST(Hostile, WhatNoDocumentHolds) {
  for (const std::string& number : {std::string("1e999999999"), repeated("9", 300'000)}) {
    const std::string why = refused<ConfigFileError>(
        [&] { group_config("{\"name\": " + number + "}", FileFormat::json); });
    EXPECT_SAYS(why, "job: ");
    EXPECT_LT(why.size(), 1000u);
  }
  EXPECT_SAYS(refused<ConfigFileError>([] { group_config("name: \"a\xff\"\n", FileFormat::yaml); }),
              "UTF-8");
  refused<InvalidArgument>([] {
    format_group_config(ProcessGroupConfig(ProcessGroupNode{.name = "a\xff"}), FileFormat::json);
  });
  const std::string why = refused<ConfigFileError>(
      [] { group_config("\"a\\e[2J\\nb\": 1\nname: w\n", FileFormat::yaml); });
  EXPECT_SAYS(why, "is not a field");
  EXPECT_EQ(why.find_first_of("\x1b\n"), std::string::npos) << why;
}

TEST(Hostile, LongLinesOfRankFiles) {
  const auto topology = Topology::uniform(2, 2);
  const std::string name(400'000, 'h');
  for (const std::string& text : {"rank 0=" + name + " slot=0", name, "rank 0=host0 slot=" + name,
                                  "rank" + std::string(400'000, ' ') + "0=host0 slot=0 x"})
    EXPECT_LT(refused<ConfigFileError>([&] { parse_rank_file(text, topology); }).size(), 2000u);
  EXPECT_EQ(parse_rank_file("rank \t 1 = host0  slot = 1 # one\nrank 0=host1 slot=0\n", topology),
            (std::vector<int>{2, 1}));
}

TEST(Hostile, NamesThatWouldWriteLinesOfTheirOwn) {
  for (const std::string name :
       {"a\\nrank 1=evil slot=0", "a b", "a\\te", "a\\u001b[2J", "a#b", ""})
    EXPECT_SAYS(refused<MappingError>([&] {
                  parse_topology("{\"hosts\": [{\"name\": \"" + name + "\"}]}", FileFormat::json);
                }),
                "the name of host");
  refused<GroupConfigError>([] { group_config("name: \"a\\nb\"", FileFormat::yaml); });
  // An error shows no control character either.
  const std::string said =
      refused<ConfigFileError>([] { parse_rank_file("\x1b[2Jhost", Topology::uniform(1, 1)); });
  EXPECT_EQ(said.find('\x1b'), std::string::npos);
  EXPECT_NE(said.find("\\x1b"), std::string::npos);
}

TEST(Hostile, SizesBeyondWhatCanBePlannedSayWhatCan) {
  for (const char* hosts : {"999999999x1", "1x999999999", "46341x46341", "999999999"})
    EXPECT_SAYS(refused<ConfigurationError>([&] { parse_hosts(hosts); }),
                "at most 4194304 can be planned");
  EXPECT_SAYS(refused<InvalidArgument>([] { Mesh(parse_axes("a=999999999", "--mesh")); }),
              "at most 4194304 can be planned");
  EXPECT_EQ(parse_hosts("131072x8").slots(), 1 << 20) << "a million is promised";
}

TEST(Hostile, LongChainsTakeNoLongTime) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::pair<ProcessGroupNode, std::string>> nodes;
  for (int i = 2999; i > 0; --i)
    nodes.push_back({ProcessGroupNode{.name = concat("n", i), .size = {}}, concat("n", i - 1)});
  nodes.push_back({ProcessGroupNode{.name = "n0", .size = {}}, ""});
  nodes.front().first.size = 4;
  const auto config = ProcessGroupConfig::from_nodes(nodes).resolve(4);
  EXPECT_EQ(config.size("n0"), 4);
  EXPECT_EQ(config.node_names().size(), 3000u);
  EXPECT_EQ(config.mesh(4).size(), 4);
  EXPECT_GT(config.to_string().size(), 3000u);
  // A cycle at the end of a long chain, and too deep a one.
  nodes.back().second = "n5";
  EXPECT_THROW(ProcessGroupConfig::from_nodes(nodes), GroupCycle);
  nodes.back().second = "";
  for (int i = 3000; i < 5000; ++i)
    nodes.push_back({ProcessGroupNode{.name = concat("n", i)}, concat("n", i - 1)});
  EXPECT_THROW(ProcessGroupConfig::from_nodes(nodes), GroupConfigError);
  // Switches in a row.
  std::string switches, hosts;
  for (int i = 0; i < 30'000; ++i)
    switches += concat(i ? ", " : "", "{\"name\": \"s", i, "\"",
                       i ? concat(", \"parent\": \"s", i - 1, "\"") : "", "}");
  for (int i = 0; i < 5'000; ++i)
    hosts += concat(i ? ", " : "", "{\"name\": \"h", i, "\", \"switch\": \"s29999\"}");
  const auto topology = parse_topology(
      concat("{\"hosts\": [", hosts, "], \"switches\": [", switches, "]}"), FileFormat::json);
  EXPECT_EQ(topology.switches.size(), 30'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(Hostile, PipesAndEndlessFiles) {
  const std::string pipe = testing::TempDir() + concat("tessera_pipe_", getpid(), ".json");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_SAYS(refused<ConfigFileError>([&] { read_group_config(pipe); }), "is empty");
  unlink(pipe.c_str());
  const std::string endless = testing::TempDir() + concat("tessera_endless_", getpid(), ".json");
  ASSERT_EQ(symlink("/dev/zero", endless.c_str()), 0);
  EXPECT_SAYS(refused<ConfigFileError>([&] { read_group_config(endless); }), "more than");
  unlink(endless.c_str());
}

TEST(Hostile, NumbersAreReadTheSameInEveryLocale) {
  for (const char* locale : {"C", "de_DE.UTF-8", "de_DE"}) {
    if (!std::setlocale(LC_ALL, locale)) continue;
    const auto topology = parse_topology(
        "hosts: [{name: a}, {name: b}]\nnetwork: {latency: 2.5us, bandwidth: 12.5GB/s}\n"
        "cross_rail_latency: 1.5e-6\n",
        FileFormat::yaml);
    EXPECT_DOUBLE_EQ(topology.network.latency, 2.5e-6) << locale;
    EXPECT_DOUBLE_EQ(topology.network.bandwidth, 12.5e9) << locale;
    EXPECT_DOUBLE_EQ(topology.cross_rail_latency, 1.5e-6) << locale;
  }
  std::setlocale(LC_ALL, "C");
}

}  // namespace
}  // namespace tessera
