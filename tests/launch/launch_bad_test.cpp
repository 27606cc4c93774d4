// Partial and contradictory environments, generated from the recorded ones: each variable dropped,
// each number spoilt.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "recorded.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/launch.h"

namespace tessera {
namespace {

using test::Variables;

struct Family {
  std::string name;
  Variables variables;
  /// May be absent.
  std::set<std::string> optional;
};

class EachFamily : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = concat(::testing::TempDir(), "tessera_rankfile_", getpid());
    std::ofstream(path_) << "launch1\nh1\nh2\n";
    Variables jsrun = test::jsrun;
    jsrun["LSB_DJOB_RANKFILE"] = path_;
    Variables ours;
    for (const auto& [name, value] : test::ours) {
      if (name.rfind("TESSERA_", 0) == 0) ours[name] = value;
    }
    families_ = {{"tessera", ours, {}},
                 {"torchrun", test::torchrun, {"TORCHELASTIC_USE_AGENT_STORE"}},
                 {"open_mpi", test::open_mpi, {"OMPI_COMM_WORLD_NODE_RANK"}},
                 {"pmi", test::hydra, {}},
                 {"jsm", jsrun, {}},
                 {"slurm", test::slurm, {"SLURM_NNODES"}},
                 {"plain", test::plain, {}}};
  }
  void TearDown() override { std::remove(path_.c_str()); }

  // Refused, with an error that names the launcher and everything in `words`.
  static void expect_refused(const Family& family, const Variables& variables,
                             const std::vector<std::string>& words) {
    try {
      const Launch launch = detect_launch(Environment{variables, ""});
      FAIL() << family.name << " accepted " << list(words) << ":\n" << to_text(launch);
    } catch (const ConfigurationError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("launcher " + family.name), std::string::npos) << text;
      for (const auto& word : words)
        EXPECT_NE(text.find(word), std::string::npos) << "no " << word << " in: " << text;
    }
  }

  std::string path_;
  std::vector<Family> families_;
};

TEST_F(EachFamily, CompleteIsAccepted) {
  for (const Family& family : families_)
    EXPECT_EQ(detect_launch(Environment{family.variables, ""}).launcher, family.name);
}

TEST_F(EachFamily, EveryMissingVariableIsNamed) {
  for (const Family& family : families_) {
    for (const auto& [name, value] : family.variables) {
      Variables partial = family.variables;
      partial.erase(name);
      if (family.optional.count(name)) {
        EXPECT_EQ(detect_launch(Environment{partial, ""}).launcher, family.name) << name;
        continue;
      }
      expect_refused(family, partial, {name});
    }
  }
}

TEST_F(EachFamily, EveryPairOfMissingVariablesIsRefused) {
  for (const Family& family : families_) {
    for (const auto& [first, a] : family.variables) {
      for (const auto& [second, b] : family.variables) {
        Variables partial = family.variables;
        partial.erase(first);
        partial.erase(second);
        if (first == second || family.optional.count(first) || family.optional.count(second))
          continue;
        // What makes the launcher known is gone: a single process, or the script of a batch job.
        const std::set<std::string> marks =
            family.name == "plain"
                ? std::set<std::string>{"RANK", "WORLD_SIZE"}
                : std::set<std::string>{"SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"};
        if (marks.count(first) && marks.count(second)) {
          EXPECT_EQ(detect_launch(Environment{partial, ""}).launcher, "single") << family.name;
        } else {
          EXPECT_THROW(detect_launch(Environment{partial, ""}), ConfigurationError)
              << family.name << " without " << first << ", " << second;
        }
      }
    }
  }
}

TEST_F(EachFamily, NumbersThatAreNone) {
  const std::set<std::string> words{"MASTER_ADDR",
                                    "TESSERA_ADDRESS",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_USE_AGENT_STORE",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_STEP_TASKS_PER_NODE",
                                    "OMPI_COMM_WORLD_NODE_RANK",
                                    "LSB_DJOB_RANKFILE"};
  for (const Family& family : families_) {
    for (const auto& [name, value] : family.variables) {
      if (words.count(name)) continue;
      for (const char* bad : {"", "-1", "+1", " 1", "1 ", "1.0", "0x1", "one",
                              "99999999999999999999999", "18446744073709551616"}) {
        Variables spoilt = family.variables;
        spoilt[name] = bad;
        expect_refused(family, spoilt, {concat(name, "='", bad, "'")});
      }
    }
  }
}

TEST_F(EachFamily, EmptyWordsAreRefused) {
  for (const Family& family : families_) {
    for (const char* name : {"MASTER_ADDR", "TESSERA_ADDRESS", "SLURM_STEP_NODELIST",
                             "SLURM_STEP_TASKS_PER_NODE", "LSB_DJOB_RANKFILE"}) {
      if (!family.variables.count(name)) continue;
      Variables spoilt = family.variables;
      spoilt[name] = "";
      expect_refused(family, spoilt, {name});
    }
  }
}

TEST_F(EachFamily, RanksBeyondTheWorldAreNamedWithBothVariables) {
  const std::map<std::string, std::vector<std::string>> pairs{
      {"tessera", {"TESSERA_RANK", "TESSERA_WORLD_SIZE"}},
      {"torchrun", {"RANK", "WORLD_SIZE"}},
      {"open_mpi", {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}},
      {"pmi", {"PMI_RANK", "PMI_SIZE"}},
      {"jsm", {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"}},
      {"slurm", {"SLURM_PROCID", "SLURM_NTASKS"}},
      {"plain", {"RANK", "WORLD_SIZE"}}};
  for (const Family& family : families_) {
    const std::string rank = pairs.at(family.name)[0];
    const std::string size = pairs.at(family.name)[1];
    for (const std::string& value : {family.variables.at(size), std::string("2147483647")}) {
      Variables spoilt = family.variables;
      spoilt[rank] = value;
      expect_refused(family, spoilt,
                     {concat(rank, "=", value), concat(size, "=", family.variables.at(size))});
    }
    Variables empty_world = family.variables;
    empty_world[size] = "0";
    EXPECT_THROW(detect_launch(Environment{empty_world, ""}), ConfigurationError) << family.name;
  }
}

TEST_F(EachFamily, LocalRanksBeyondTheHostAreRefused) {
  const std::map<std::string, std::string> local_rank{
      {"tessera", "TESSERA_LOCAL_RANK"},          {"torchrun", "LOCAL_RANK"},
      {"open_mpi", "OMPI_COMM_WORLD_LOCAL_RANK"}, {"pmi", "MPI_LOCALRANKID"},
      {"jsm", "JSM_NAMESPACE_LOCAL_RANK"},        {"slurm", "SLURM_LOCALID"}};
  const std::map<std::string, std::string> local_size{{"tessera", "TESSERA_LOCAL_SIZE"},
                                                      {"torchrun", "LOCAL_WORLD_SIZE"},
                                                      {"open_mpi", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                                      {"pmi", "MPI_LOCALNRANKS"}};
  for (const Family& family : families_) {
    if (local_rank.count(family.name)) {
      Variables spoilt = family.variables;
      spoilt[local_rank.at(family.name)] = "3";
      expect_refused(family, spoilt, {local_rank.at(family.name) + "=3"});
    }
    if (local_size.count(family.name)) {
      Variables spoilt = family.variables;
      spoilt[local_size.at(family.name)] = "100";
      expect_refused(family, spoilt, {local_size.at(family.name) + "=100"});
    }
  }
}

TEST_F(EachFamily, Contradictions) {
  auto with = [](Variables v, const Variables& changes) {
    for (const auto& [name, value] : changes) v[name] = value;
    return v;
  };
  const Family slurm{"slurm", test::slurm, {}};
  expect_refused(slurm, with(test::slurm, {{"SLURM_STEP_TASKS_PER_NODE", "2,1"}}),
                 {"2,1", "SLURM_NTASKS=4"});
  expect_refused(
      slurm, with(test::slurm, {{"SLURM_STEP_NODELIST", "n[1-3]"}, {"SLURM_NNODES", "3"}}), {"n3"});
  expect_refused(slurm, with(test::slurm, {{"SLURM_NNODES", "1"}}), {"SLURM_NNODES='1'", "n[1-2]"});
  expect_refused(slurm, with(test::slurm, {{"SLURM_NODEID", "2"}}), {"SLURM_NODEID='2'"});
  expect_refused(slurm, with(test::slurm, {{"SLURM_STEP_NUM_TASKS", "5"}}),
                 {"SLURM_STEP_NUM_TASKS='5'", "SLURM_NTASKS='4'"});
  expect_refused(slurm, with(test::slurm, {{"SLURM_STEP_NUM_NODES", "5"}}),
                 {"SLURM_STEP_NUM_NODES='5'"});
  EXPECT_THROW(detect_launch({with(test::slurm, {{"SLURM_STEP_NODELIST", "n[1-2"}}), ""}),
               ConfigurationError);

  const Family torchrun{"torchrun", test::torchrun, {}};
  expect_refused(torchrun, with(test::torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "yes"}}),
                 {"TORCHELASTIC_USE_AGENT_STORE='yes'"});
  expect_refused(torchrun, with(test::torchrun, {{"GROUP_WORLD_SIZE", "1"}}),
                 {"GROUP_RANK='1'", "GROUP_WORLD_SIZE='1'"});
  expect_refused(torchrun, with(test::torchrun, {{"LOCAL_WORLD_SIZE", "4"}}),
                 {"GROUP_RANK=1", "LOCAL_WORLD_SIZE=4"});
  for (const char* port : {"0", "65536", "70000"})
    expect_refused(torchrun, with(test::torchrun, {{"MASTER_PORT", port}}),
                   {concat("MASTER_PORT='", port, "'")});

  // What is there is said, too.
  expect_refused({"plain", {}, {}}, {{"RANK", "1"}, {"WORLD_SIZE", "2"}},
                 {"MASTER_ADDR", "MASTER_PORT", "RANK='1'", "WORLD_SIZE='2'"});

  const Family open_mpi{"open_mpi", test::open_mpi, {}};
  expect_refused(open_mpi,
                 with(test::open_mpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}}),
                 {"MASTER_PORT", "MASTER_ADDR='a'"});
  expect_refused(open_mpi,
                 with(test::open_mpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"MASTER_PORT", "1"}}),
                 {"MASTER_ADDR", "MASTER_PORT='1'"});

  const Family pmi{"pmi", {}, {}};
  expect_refused(pmi, with(test::slurm, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}),
                 {"MPI_LOCALRANKID", "PMI_RANK='1'"});

  const Family plain{"plain", {}, {}};
  expect_refused(plain, with(test::plain, {{"LOCAL_RANK", "0"}}),
                 {"LOCAL_WORLD_SIZE", "LOCAL_RANK='0'"});

  const Family jsm{"jsm", {}, {}};
  expect_refused(jsm, with(test::jsrun, {{"LSB_DJOB_RANKFILE", "/nowhere/at/all"}}),
                 {"LSB_DJOB_RANKFILE='/nowhere/at/all'"});
  std::ofstream(path_) << "launch1\n";
  expect_refused(jsm, with(test::jsrun, {{"LSB_DJOB_RANKFILE", path_}}), {"no compute host"});
}

}  // namespace
}  // namespace tessera
