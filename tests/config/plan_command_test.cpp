// The program `tessera plan`, run as a user runs it: no job, no torch.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>

#include "refused.h"
#include "tessera/base/text.h"

using namespace tessera;
using Json = nlohmann::json;
using Lists = std::vector<std::vector<int>>;

namespace {

struct Output {
  int status = -1;
  std::string out, err;
};

class PlanCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        ::testing::TempDir() +
        concat("tessera_plan_", ::testing::UnitTest::GetInstance()->current_test_info()->name(),
               "_", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name));
    std::ostringstream text;
    text << file.rdbuf();
    return std::move(text).str();
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }

  Output plan(const std::string& arguments) const {
    const std::string command = concat("cd ", folder_, " && timeout 60 ", TESSERA_CLI, " plan ",
                                       arguments, " 2> stderr.txt");
    Output output;
    FILE* pipe = popen(command.c_str(), "r");
    char buffer[4096];
    for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;)
      output.out.append(buffer, n);
    const int status = pclose(pipe);
    output.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    output.err = read("stderr.txt");
    return output;
  }
  Json json(const std::string& arguments) const {
    const auto output = plan(arguments + " --json -");
    EXPECT_EQ(output.status, 0) << output.err;
    return Json::parse(output.out, nullptr, false);
  }

  std::string folder_;
};

std::set<std::vector<int>> as_set(const Json& lists) {
  const auto groups = lists.get<Lists>();
  return {groups.begin(), groups.end()};
}

TEST_F(PlanCommand, TrafficOfATracedStep) {
  write("step.yaml",
        "mesh: {data: 2, model: 2}\ntraffic:\n"
        "  - {axes: [data], collective: all_reduce, bytes: 64e6, calls: 2}\n"
        "  - {axes: [data, model], collective: broadcast, bytes: 8}\n");
  const auto written = plan(
      "--hosts 2x2 --mesh data=2,model=2 --traffic "
      "data=all_reduce:64MB*2,data-model=broadcast:8");
  ASSERT_EQ(written.status, 0) << written.err;
  const auto traced = plan("--hosts 2x2 --traffic step.yaml");
  EXPECT_EQ(traced.status, 0) << traced.err;
  EXPECT_EQ(traced.out, written.out);
  EXPECT_EQ(plan("--hosts 2x2 --mesh data=2,model=2 --traffic step.yaml").out, written.out);
  std::filesystem::create_directories(path("below"));
  write("below/step.json", R"({"mesh": {"data": 2, "model": 2}, "traffic": [
    {"axes": ["data"], "collective": "all_reduce", "bytes": 64e6, "calls": 2},
    {"axes": ["data", "model"], "collective": "broadcast", "bytes": 8}]})");
  write("below/request.yaml", "hosts: 2x2\ntraffic: step.json\n");
  EXPECT_EQ(plan("below/request.yaml").out, written.out);
  const auto other = plan("--hosts 2x2 --mesh rows=4 --traffic step.yaml");
  EXPECT_EQ(other.status, 2);
  EXPECT_SAYS(other.err, "'data'");
  EXPECT_SAYS(plan("--hosts 2x2 --traffic absent.yaml").err, "absent.yaml");
  write("step.yaml", "mesh: {data: 4}\ntraffic: [{axes: [data], collective: send, bytes: .inf}]\n");
  const auto infinite = plan("--hosts 2x2 --traffic step.yaml");
  EXPECT_EQ(infinite.status, 2);
  EXPECT_SAYS(infinite.err, "step.yaml");
}

TEST_F(PlanCommand, NamedOrdersOfTheVectors) {
  std::ifstream file(TESSERA_VECTORS);
  const Json vectors = Json::parse(file);
  for (const Json& v : vectors["order_first_axis_adjacent"]) {
    std::string names, sizes;
    for (const auto& [name, unused] : v["groups"].items())
      names += (names.empty() ? "" : ",") + name;
    for (const auto& [name, size] : v["config"].items())
      if (name != "order") sizes += concat(sizes.empty() ? "" : ",", name, "=", size.get<int>());
    const Json out = json(concat("--world ", v["world"].get<int>(), " --sizes ", sizes, " --order ",
                                 v["config"]["order"].get<std::string>(), " --groups ", names));
    ASSERT_EQ(out["groups"].size(), v["groups"].size());
    for (const auto& [name, lists] : v["groups"].items())
      EXPECT_EQ(as_set(out["groups"][name]), as_set(lists)) << name;
  }
}

TEST_F(PlanCommand, TheIssuesExample) {
  const Json out =
      json("--world 16 --sizes tp=2,dp=2,pp=4 --order tp-cp-ep-dp-pp --groups tp,dp,pp,tp-pp");
  EXPECT_EQ(out["groups"]["tp"][0], (std::vector<int>{0, 1}));
  EXPECT_EQ(out["groups"]["dp"][0], (std::vector<int>{0, 2}));
  EXPECT_EQ(out["groups"]["pp"][0], (std::vector<int>{0, 4, 8, 12}));
  EXPECT_EQ(out["groups"]["tp-pp"][0], (std::vector<int>{0, 1, 4, 5, 8, 9, 12, 13}));
  EXPECT_EQ(out["order"], "tp-cp-ep-dp-pp");
}

TEST_F(PlanCommand, Trees) {
  write("config.yaml",
        "tree: {world: [mp, dp], dp: [shard, replicate]}\nleaf_sizes: {mp: 2, shard: 4}\n"
        "nodes: {shard: {orthogonal_group: across}}\northogonal: [{name: across_world, of: "
        "[shard], scope: world}]\n");
  std::ifstream file(TESSERA_VECTORS);
  const Json v = Json::parse(file)["tree_nested_orthogonal_16"];
  const Json out = json("--world 16 --tree config.yaml");
  for (const char* name : {"mp", "shard", "replicate", "dp"})
    EXPECT_EQ(as_set(out["groups"][name]), as_set(v["groups"][name])) << name;
  EXPECT_EQ(as_set(out["groups"]["across"]),
            as_set(v["groups"]["orthogonal to shard, in its parent dp"]));
  EXPECT_EQ(as_set(out["groups"]["across_world"]),
            as_set(v["groups"]["orthogonal to shard, in the world"]));
  const auto text = plan("--world 16 --tree config.yaml --rank 9");
  EXPECT_SAYS(text.out, "across: rank 1 of 2 in [1, 9], orthogonal to [shard] in dp");
  EXPECT_SAYS(text.out, "order mp-shard-replicate (first = adjacent ranks)");
}

TEST_F(PlanCommand, PlacementFilesAndPicture) {
  const Json out = json(
      "--hosts 2x4 --mesh model=4,data=2 --traffic model=all_reduce:512MB,data=all_reduce:1MB "
      "--rankfile ranks.txt --slurm-hostfile hosts.txt "
      "--picture p.svg --hierarchical model");
  EXPECT_LT(out["placement"]["seconds"].get<double>(),
            out["placement"]["naive_seconds"].get<double>() / 4);
  EXPECT_TRUE(out["placement"]["exact"].get<bool>());
  EXPECT_EQ(out["families"]["model"]["runs"], "inside hosts");
  EXPECT_EQ(out["families"]["data"]["runs"], "between hosts");
  EXPECT_EQ(out["groups"]["model.inside"], out["groups"]["model"]);
  EXPECT_EQ(out["families"]["model.between"]["size"], 1);
  // The rank file says what the JSON says.
  std::istringstream lines(read("ranks.txt"));
  std::string line;
  for (int r = 0; r < 8; ++r) {
    ASSERT_TRUE(std::getline(lines, line));
    const int slot = out["placement"]["slot_of_rank"][r];
    EXPECT_EQ(line, concat("rank ", r, "=host", slot / 4, " slot=", slot % 4));
  }
  std::istringstream hosts(read("hosts.txt"));
  for (int r = 0; r < 8; ++r) {
    ASSERT_TRUE(std::getline(hosts, line));
    EXPECT_EQ(line, out["placement"]["host_of_rank"][r]);
  }
  const auto svg = read("p.svg");
  EXPECT_EQ(svg.rfind("<svg xmlns=", 0), 0u);
  EXPECT_EQ(svg.find("http", 30), std::string::npos);  // nothing is loaded from elsewhere
  // The file back as the user's own mapping costs the same, and the launcher's table makes the same
  // mesh.
  const Json again = json(
      "--hosts 2x4 --mesh model=4,data=2 --traffic model=all_reduce:512MB,data=all_reduce:1MB "
      "--mapping ranks.txt");
  EXPECT_EQ(again["placement"]["seconds"], out["placement"]["seconds"]);
  EXPECT_EQ(again["placement"]["method"], "given");
  std::string table;
  for (const auto& rank : out["placement"]["launcher_table"])
    table += concat(table.empty() ? "" : ",", rank.get<int>());
  const Json launched = json(
      "--hosts 2x4 --mesh model=4,data=2 --traffic model=all_reduce:512MB,data=all_reduce:1MB "
      "--keep --ranks " +
      table);
  EXPECT_EQ(launched["placement"]["seconds"], out["placement"]["seconds"]);
}

TEST_F(PlanCommand, TextShowsCostAndWarnings) {
  const auto out = plan(
      "--hosts 16x8 --mesh data=2,model=64 --traffic model=all_reduce:512MB,data=all_reduce:1MB");
  EXPECT_EQ(out.status, 0) << out.err;
  EXPECT_SAYS(out.out, "warning: model crosses hosts");
  EXPECT_SAYS(out.out, "cost of a step");
  EXPECT_SAYS(out.out, "no placement costs less than");
  const auto kept =
      plan("--hosts 2x4 --mesh model=4,data=2 --traffic model=all_reduce:512MB --keep");
  EXPECT_SAYS(kept.out, "warning: model crosses hosts and takes");
  const auto spare = plan("--hosts 2x4 --mesh data=6");
  EXPECT_SAYS(spare.out, "2 of 8 devices stay without a rank");
}

TEST_F(PlanCommand, RequestFilesSayWhatFlagsSay) {
  write("cluster.yaml", "hosts: 16x8\n");
  write("plan.yaml",
        "mesh: {data: 8, domain: 4, model: 4}\ntopology: cluster.yaml\ngroups: [data, "
        "domain-model]\ntraffic: {model: 'all_reduce:512MB', data: "
        "'all_reduce:1GB*2'}\n");
  const std::string flags =
      "--hosts 16x8 --mesh data=8,domain=4,model=4 --groups data,domain-model --traffic "
      "model=all_reduce:512MB,data=all_reduce:1GB*2";
  EXPECT_EQ(json("plan.yaml"), json(flags));
  EXPECT_EQ(json("plan.yaml --keep")["placement"]["method"], "naive");  // flags on top
  EXPECT_EQ(json("plan.yaml --groups model")["groups"].size(), 1u);
}

TEST_F(PlanCommand, ViewsAndTables) {
  const Json out = json(
      "--mesh data=4,tensor=2 --view expert:expert_data=2,expert=2,tensor=2 --ranks "
      "7,6,5,4,3,2,1,0");
  EXPECT_EQ(out["groups"]["expert"], (Lists{{7, 5}, {6, 4}, {3, 1}, {2, 0}}));
  EXPECT_EQ(out["groups"]["tensor"][0], (std::vector<int>{7, 6}));
  const auto refused_view = plan("--mesh data=4,tensor=2 --view expert:tensor=2,expert=4");
  EXPECT_NE(refused_view.status, 0);
  EXPECT_SAYS(refused_view.err, "axis 'tensor' differs between two views");
}

TEST_F(PlanCommand, BadInputIsAnErrorThatSaysWhy) {
  const auto says = [&](const std::string& arguments, const std::string& part) {
    const auto output = plan(arguments);
    EXPECT_EQ(output.status, 2) << arguments;
    EXPECT_SAYS(output.err, part);
  };
  says("--world 16 --sizes tp=3,dp=5 --order tp-dp", "15");
  says("--world 16 --sizes tp=2,xx=2 --order tp-dp", "'xx'");
  says("--world 16 --order tp-tp --sizes tp=16", "is duplicated");
  says("--mesh data=2,data=4", "is duplicated");
  says("--mesh data=two", "'two'");
  says("--hosts 999999999x1 --mesh data=8", "at most 4194304 can be planned");
  says("--mesh data=999999999", "at most 4194304 can be planned");
  says("--mesh data", "name=value");
  says("--world 8", "in one way");
  says("--mesh data=8 --order data --sizes data=8", "in one way");
  says("--mesh data=8 --groups model", "'model'");
  says("--mesh data=8 --traffic data=all_reduce:1MB", "no machines");
  says("--mesh data=8 --hosts 1x4", "8 ranks does not fit on 1 host with 4 devices");
  says("--mesh data=2 --hosts 1x1", "2 ranks does not fit on 1 host with 1 device in all");
  says("--mesh data=8 --hosts 1x4", "give it smaller axes, or more hosts or devices");
  says("--mesh data=8 --hosts 2x4 --traffic data=gossip:1MB", "'gossip'");
  says("--mesh data=8 --hosts 2x4 --traffic data=all_reduce:1parsec", "'parsec'");
  says("--mesh data=8 --hosts 2x4 --topology x.yaml", "in one way");
  says("--mesh data=8 --rank 8", "rank 8 is not in the mesh");
  says("--mesh data=8 --rankfile r.txt", "needs the machines");
  says("--mesh data=8 --picture p.png", ".svg or .html");
  says("--mesh data=8 --ranks 0,1,2", "8");
  says("--mesh data=8 --json /no/such/folder/x.json", "cannot be written");
  says("--tree missing.yaml --world 8", "missing.yaml");
  says("--mesh data=8 --hosts 2x4 --hwloc missing.xml", "missing.xml");
  says("--frobnicate", "frobnicate");
  write("r.txt", "rank 0=host0 slot=0\nrank 1=host0 slot=0\n");
  says("--mesh data=2 --hosts 1x2 --mapping r.txt", "ranks 0 and 1 both on slot 0");
}

TEST_F(PlanCommand, AFullDiskIsAnError) {
  const auto output = plan("--mesh a=4 > /dev/full");
  EXPECT_EQ(output.status, 125);
  EXPECT_SAYS(output.err, "cannot be written");
}

TEST_F(PlanCommand, NeverDearerThanNaive) {
  std::mt19937 random(51);
  for (int n = 0; n < 12; ++n) {
    const int hosts = 1 + static_cast<int>(random() % 4),
              devices = 1 + static_cast<int>(random() % 4);
    const char* kinds[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                           "all_to_all", "send"};
    const Json out =
        json(concat("--hosts ", hosts, "x", devices, " --mesh a=", devices, ",b=", hosts,
                    " --traffic a=", kinds[random() % 7], ":", 1 + random() % 9, "MB"));
    EXPECT_LE(out["placement"]["seconds"].get<double>(),
              out["placement"]["naive_seconds"].get<double>());
    EXPECT_LE(out["placement"]["lower_bound"].get<double>(),
              out["placement"]["seconds"].get<double>() * (1 + 1e-9));
  }
}

TEST_F(PlanCommand, ThousandsOfRanks) {
  const Json out = json(
      "--hosts 512x8 --mesh pipe=8,data=64,model=8 --traffic "
      "model=all_reduce:512MB,data=all_reduce:1GB --picture p.html --rank 100");
  EXPECT_EQ(out["groups"]["model"].size(), 512u);
  EXPECT_EQ(out["rank"]["groups"]["model"]["ranks"]
               [out["rank"]["groups"]["model"]["group_rank"].get<int>()],
            100);
  EXPECT_LT(read("p.html").size(), 6u << 20);
}

}  // namespace
