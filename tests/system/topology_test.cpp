// `tessera bench topology` measures a running job. What the numbers are is the machine's business;
// what they describe is checked, and that `tessera plan` takes the file.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "process.h"
#include "tessera/config/topology_file.h"
#include "two_hosts.h"

namespace tessera::test {
namespace {

class TopologyProbe : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        ::testing::TempDir() +
        concat("tessera_probe_", ::testing::UnitTest::GetInstance()->current_test_info()->name(),
               "_", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::vector<std::string> probe(const std::vector<std::string>& more) const {
    std::vector<std::string> command{TESSERA_PROGRAM, "bench",       "topology", "--seconds",
                                     "0.002",         "--kilobytes", "64"};
    command.insert(command.end(), more.begin(), more.end());
    return command;
  }
  std::vector<std::string> local(int ranks, const std::vector<std::string>& more) const {
    std::vector<std::string> command{TESSERA_PROGRAM, "run", "-n", std::to_string(ranks),
                                     "--timeout",     "100", "--"};
    const auto words = probe(more);
    command.insert(command.end(), words.begin(), words.end());
    return command;
  }

  std::string folder_;
};

void expect_numbers(const Topology& topology) {
  for (const LinkClass& link : topology.device_links) {
    EXPECT_GT(link.latency, 0);
    EXPECT_LT(link.latency, 10);
    EXPECT_GT(link.bandwidth, 1e3);
  }
}

TEST_F(TopologyProbe, OneHostAndThePlanThatReadsIt) {
  for (const std::string file : {"t.json", "t.yaml"}) {
    Process run(local(3, {"--out", path(file)}));
    EXPECT_EQ(run.finish(std::chrono::seconds(120)), 0) << run.out() << run.err();
    EXPECT_TRUE(run.holds("3 ranks on 1 host")) << run.out();
    EXPECT_TRUE(run.holds("inside ")) << run.out();
    const Topology topology = read_topology(path(file));
    ASSERT_EQ(topology.hosts.size(), 1u);
    EXPECT_EQ(topology.hosts[0].devices, 3);
    EXPECT_TRUE(topology.switches.empty());
    expect_numbers(topology);
    Process plan({TESSERA_PROGRAM, "plan", "--topology", path(file), "--mesh", "data=3",
                  "--traffic", "data=all_reduce:1MB"});
    EXPECT_EQ(plan.finish(), 0) << plan.err();
    EXPECT_TRUE(plan.holds(topology.hosts[0].name + ": [0, 1, 2]")) << plan.out();
    EXPECT_TRUE(plan.holds("all_reduce")) << plan.out();
  }
}

TEST_F(TopologyProbe, FourRanksOnOneHostToStandardOutput) {
  Process run(local(4, {"--pairs", "4"}));
  EXPECT_EQ(run.finish(std::chrono::seconds(120)), 0) << run.out() << run.err();
  std::string text;  // less what `tessera run` puts in front
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);)
    text += line.substr(line.find("] ") + 2) + "\n";
  const Topology topology = parse_topology(text, FileFormat::json);
  EXPECT_EQ(topology.slots(), 4);
  expect_numbers(topology);
  EXPECT_NE(run.err().find("     4 "), std::string::npos) << "four pairs: " << run.err();
}

TEST_F(TopologyProbe, RefusesWhatCannotBeMeasured) {
  Process alone(probe({}));
  EXPECT_EQ(alone.finish(), 1);
  EXPECT_TRUE(alone.holds("one rank has no links")) << alone.err();
  Process name(probe({"--out", "t.txt"}));
  EXPECT_EQ(name.finish(), 1);
  EXPECT_TRUE(name.holds(".json, .yaml")) << name.err();
  Process folder(local(2, {"--out", path("no/such/t.json")}));
  EXPECT_NE(folder.finish(std::chrono::seconds(120)), 0);
  EXPECT_TRUE(folder.holds("no/such/t.json")) << folder.err();
  Process option(probe({"--seconds", "-1"}));
  EXPECT_EQ(option.finish(), 2);
  Process other({TESSERA_PROGRAM, "bench", "nothing"});
  EXPECT_NE(other.finish(), 0);
}

/// Ranks 0 and 2 on alpha, 1 and 3 on beta (a cyclic distribution): Slurm's environment, and a
/// namespace each.
TEST_F(TopologyProbe, TwoHostsWithRanksInTurn) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<std::string> command{"ip", "netns", "exec", hosts.space(rank % 2)};
    const auto words = probe({"--out", path("t.json"), "--rankfile", path("ranks")});
    command.insert(command.end(), words.begin(), words.end());
    ranks.push_back(std::make_unique<Process>(
        command, std::map<std::string, std::string>{{"SLURM_JOB_ID", "78"},
                                                    {"SLURM_STEP_ID", "0"},
                                                    {"SLURM_NTASKS", "4"},
                                                    {"SLURM_PROCID", std::to_string(rank)},
                                                    {"SLURM_LOCALID", std::to_string(rank / 2)},
                                                    {"SLURM_NODEID", std::to_string(rank % 2)},
                                                    {"SLURM_STEP_NODELIST", "alpha,beta"},
                                                    {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                                    {"MASTER_ADDR", TwoHosts::address(0)},
                                                    {"MASTER_PORT", "29533"}}));
  }
  for (auto& rank : ranks)
    EXPECT_EQ(rank->finish(std::chrono::seconds(120)), 0) << rank->out() << rank->err();
  const Topology topology = read_topology(path("t.json"));
  ASSERT_EQ(topology.hosts.size(), 2u);
  EXPECT_EQ(topology.hosts[0].name, "alpha");
  EXPECT_EQ(topology.hosts[1].name, "beta");
  EXPECT_EQ(topology.hosts[0].devices, 2);
  expect_numbers(topology);
  EXPECT_GT(topology.network.latency, 0);
  EXPECT_NE(topology.network.bandwidth, Topology{}.network.bandwidth) << "measured, not assumed";
  // Where the ranks are now: data's groups stand on one host each.
  Process plan({TESSERA_PROGRAM, "plan", "--topology", path("t.json"), "--mapping", path("ranks"),
                "--mesh", "data=2,model=2", "--traffic", "data=all_reduce:1MB"});
  EXPECT_EQ(plan.finish(), 0) << plan.err();
  EXPECT_TRUE(plan.holds("data: 2 of 2 ranks, inside hosts")) << plan.out();
  EXPECT_TRUE(plan.holds("model: 2 of 2 ranks, between hosts")) << plan.out();
}

}  // namespace
}  // namespace tessera::test
