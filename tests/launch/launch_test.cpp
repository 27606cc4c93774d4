// Each launcher's recorded environment, and who wins where launchers nest.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "recorded.h"
#include "tessera/base/error.h"
#include "tessera/launch/internal/secret.h"
#include "tessera/launch/launch.h"

namespace tessera {
namespace {

using test::Variables;
using Hosts = std::vector<std::string>;
using Counts = std::vector<int>;

Launch detect(const Variables& variables, const LaunchOverrides& overrides = {},
              const std::string& hostname = "") {
  return detect_launch(Environment{variables, hostname}, overrides);
}

void expect_place(const Launch& launch, const std::string& launcher,
                  Counts rank_world_local_size_node) {
  const Counts place{launch.rank, launch.world_size, launch.local_rank, launch.local_size,
                     launch.node_rank};
  EXPECT_EQ(launch.launcher, launcher);
  EXPECT_EQ(place, rank_world_local_size_node) << to_text(launch);
}

class RankFile {
 public:
  explicit RankFile(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "tessera_rankfile_XXXXXX").string();
    const int fd = mkstemp(path_.data());
    EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    close(fd);
  }
  ~RankFile() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Launch, SingleWithoutAnyVariable) {
  const Launch launch = detect({}, {}, "box");
  expect_place(launch, "single", {0, 1, 0, 1, 0});
  EXPECT_EQ(launch.hosts, Hosts{"box"});
  EXPECT_EQ(launch.ranks_per_host, Counts{1});
  EXPECT_TRUE(launch.address.empty());
  EXPECT_NO_THROW(require_rendezvous(launch));
}

TEST(Launch, MasterVariablesAloneAreNoLauncher) {
  expect_place(detect({{"MASTER_ADDR", "host"}, {"MASTER_PORT", "29500"}, {"LOCAL_RANK", "0"}}),
               "single", {0, 1, 0, 1, 0});
}

TEST(Launch, OurLauncher) {
  const Launch launch = detect(test::ours, {}, "box");
  expect_place(launch, "tessera", {1, 3, 1, 3, 0});
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_EQ(launch.port, 40123);
  EXPECT_FALSE(launch.agent_serves_store);
  EXPECT_EQ(launch.ranks_per_host, Counts{3});
}

TEST(Launch, Torchrun) {
  const Launch launch = detect(test::torchrun);
  expect_place(launch, "torchrun", {3, 4, 1, 2, 1});
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_EQ(launch.port, 29500);
  EXPECT_TRUE(launch.agent_serves_store);
  EXPECT_EQ(launch.job_id, "none");
  EXPECT_EQ(launch.origin.at("rank"), "RANK=3");

  Variables other = test::torchrun;
  other["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_FALSE(detect(other).agent_serves_store);
  other.erase("TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_FALSE(detect(other).agent_serves_store);
}

TEST(Launch, OpenMpiOnOneHostMeetsOnLoopback) {
  // OMPI_COMM_WORLD_NODE_RANK is 1 here, and the node is number 0 all the same.
  const Launch launch = detect(test::open_mpi);
  expect_place(launch, "open_mpi", {1, 2, 1, 2, 0});
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_EQ(launch.port, 29500);

  Variables named = test::open_mpi;
  named["PMIX_NAMESPACE"] = "1797128193";
  const int port = detect(named).port;
  EXPECT_GE(port, 61440);
  EXPECT_LE(port, 65535);
  named["OMPI_COMM_WORLD_RANK"] = named["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  EXPECT_EQ(detect(named).port, port) << "every rank of a job finds the same port";
}

TEST(Launch, OpenMpiOverSeveralHostsNeverGuessesAnAddress) {
  Variables wide = test::open_mpi;
  wide["OMPI_COMM_WORLD_SIZE"] = "4";
  const Launch launch = detect(wide);
  expect_place(launch, "open_mpi", {1, 4, 1, 2, -1});
  EXPECT_TRUE(launch.address.empty());
  EXPECT_TRUE(launch.hosts.empty());
  try {
    require_rendezvous(launch);
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_NE(std::string(error.what()).find("mpirun -x MASTER_ADDR"), std::string::npos)
        << error.what();
  }
  wide["MASTER_ADDR"] = "node7";
  wide["MASTER_PORT"] = "1234";
  EXPECT_EQ(detect(wide).address, "node7");
  EXPECT_EQ(detect(wide).port, 1234);
  EXPECT_NO_THROW(require_rendezvous(detect(wide)));
}

TEST(Launch, HydraAndPals) {
  const Launch launch = detect(test::hydra);
  expect_place(launch, "pmi", {1, 2, 1, 2, 0});
  EXPECT_EQ(launch.address, "127.0.0.1");
  expect_place(
      detect(
          {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"PMI_LOCAL_RANK", "1"}, {"PMI_LOCAL_SIZE", "4"}}),
      "pmi", {5, 8, 1, 4, -1});
}

TEST(Launch, Jsrun) {
  const RankFile file("launch1\nh1\nh1\nh2\nh2\n");
  Variables variables = test::jsrun;
  variables["LSB_DJOB_RANKFILE"] = file.path();
  Launch launch = detect(variables, {}, "h2.cluster");
  expect_place(launch, "jsm", {2, 4, 0, 2, 1});
  EXPECT_EQ(launch.hosts, (Hosts{"h1", "h2"}));
  EXPECT_EQ(launch.address, "h1") << "the first compute host, not the launch node";
  EXPECT_EQ(launch.port, 61440 + 1234);
  EXPECT_EQ(launch.job_id, "1234");
  EXPECT_EQ(detect(variables, {}, "elsewhere").node_rank, -1);

  variables["JSM_NAMESPACE_LOCAL_SIZE"] = "3";
  EXPECT_EQ(detect(variables, {}, "h2").local_size, 3) << "unequal ranks per host are normal";
}

TEST(Launch, JsrunWithoutLocalSizeAsksRatherThanGuesses) {
  const RankFile file("launch1\nh1\nh2\nh3\n");
  Variables variables = test::jsrun;
  variables["LSB_DJOB_RANKFILE"] = file.path();
  EXPECT_THROW(detect(variables), ConfigurationError);
  LaunchOverrides overrides;
  overrides.local_size = 2;
  EXPECT_EQ(detect(variables, overrides).local_size, 2);
}

TEST(Launch, SlurmStep) {
  const Launch launch = detect(test::slurm);
  expect_place(launch, "slurm", {2, 4, 0, 2, 1});
  EXPECT_EQ(launch.hosts, (Hosts{"n1", "n2"}));
  EXPECT_EQ(launch.ranks_per_host, (Counts{2, 2}));
  EXPECT_EQ(launch.address, "n1");
  EXPECT_EQ(launch.port, 61440 + 1234) << "the job number has leading zeros, and is decimal";
  EXPECT_EQ(launch.job_id, "0001234");
}

TEST(Launch, SlurmStepsOfOneJobGetDifferentPorts) {
  Variables second = test::slurm;
  second["SLURM_STEP_ID"] = "1";
  EXPECT_NE(detect(second).port, detect(test::slurm).port);
  EXPECT_EQ(derived_port(1234, 0), 62674);
  EXPECT_EQ(derived_port(4096, 0), 61440);
  for (unsigned long long step = 0; step < 100; ++step) {
    EXPECT_GE(derived_port(987654321, step), 61440);
    EXPECT_LE(derived_port(987654321, step), 65535);
  }
}

TEST(Launch, SlurmUnequalTasks) {
  Variables v = test::slurm;
  v["SLURM_STEP_NODELIST"] = "alpha[3,1],beta";
  v["SLURM_STEP_TASKS_PER_NODE"] = "1(x2),3";
  v["SLURM_NTASKS"] = "5";
  v["SLURM_NNODES"] = "3";
  v["SLURM_NODEID"] = "2";
  v["SLURM_PROCID"] = "4";
  v["SLURM_LOCALID"] = "2";
  const Launch launch = detect(v);
  expect_place(launch, "slurm", {4, 5, 2, 3, 2});
  EXPECT_EQ(launch.hosts, (Hosts{"alpha3", "alpha1", "beta"}));
  EXPECT_EQ(launch.ranks_per_host, (Counts{1, 1, 3}));
  EXPECT_EQ(launch.address, "alpha3");
}

TEST(Launch, SlurmCyclicDistributionIsTakenAsGiven) {
  Variables v = test::slurm;
  v["SLURM_PROCID"] = "3";
  v["SLURM_LOCALID"] = "1";
  v["SLURM_NODEID"] = "1";
  expect_place(detect(v), "slurm", {3, 4, 1, 2, 1});
}

// srun --distribution=arbitrary, as Slurm 22.05 sets it: the nodes stay sorted, and rank 0 is where
// the host file begins.
TEST(Launch, SlurmHostFileSaysWhereRankZeroIs) {
  Variables v = test::slurm;
  v["SLURM_DISTRIBUTION"] = "arbitrary";
  v["SLURM_STEP_TASKS_PER_NODE"] = "1,2";
  v["SLURM_NTASKS"] = "3";
  const auto at = [&](int rank, int node, int local, const std::string& text) {
    const RankFile file(text);
    v["SLURM_HOSTFILE"] = file.path();
    v["SLURM_PROCID"] = std::to_string(rank);
    v["SLURM_NODEID"] = std::to_string(node);
    v["SLURM_LOCALID"] = std::to_string(local);
    return detect(v);
  };
  for (const char* text : {"n2\nn1\nn2\n", "# where\n\n n2 # the first\nn1\nn2", "n2,n1\nn2\n",
                           "n[2,1]\nn2\n", "n2\r\nn1\r\nn2\r\n", "n2*2\nn1\n"}) {
    expect_place(at(0, 1, 0, text), "slurm", {0, 3, 0, 2, 1});
    expect_place(at(1, 0, 0, text), "slurm", {1, 3, 0, 1, 0});
    EXPECT_EQ(at(0, 1, 0, text).address, "n2") << text;
    EXPECT_EQ(at(1, 0, 0, text).address, "n2") << text;
    EXPECT_EQ(at(2, 1, 1, text).address, "n2") << text;
  }
  const auto refused = [&](const Variables& variables, const std::string& says) {
    try {
      detect(variables);
      ADD_FAILURE() << "accepted where this was expected: " << says;
    } catch (const ConfigurationError& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("MASTER_ADDR"), std::string::npos) << error.what();
    }
  };
  EXPECT_THROW(at(1, 0, 0, "# nothing\n\n"), ConfigurationError);
  at(1, 0, 0, "n2\n");
  refused(v, "cannot be read");  // the file has gone, as where the hosts do not share it
  Variables master = v;
  master["MASTER_ADDR"] = "n2-ib0";
  EXPECT_EQ(detect(master).address, "n2-ib0");
  LaunchOverrides code;
  code.address = "10.0.0.2";
  EXPECT_EQ(detect(v, code).address, "10.0.0.2");
  // --nodelist without a file: nobody can know, but rank 0 sees that it is not where it is sought.
  Variables list = test::slurm;
  list["SLURM_DISTRIBUTION"] = "arbitrary";
  list["SLURM_PROCID"] = "0";
  refused(list, "rank 0 runs on 'n2' and the others look for it on 'n1'");
  list["SLURM_NODEID"] = "0";
  EXPECT_EQ(detect(list).address, "n1");
  // A file that stands in the environment while srun distributes by itself.
  list["SLURM_DISTRIBUTION"] = "block";
  list["SLURM_HOSTFILE"] = "/nowhere";
  EXPECT_EQ(detect(list).address, "n1");
}

TEST(Launch, SlurmUsersOwnMasterWins) {
  Variables v = test::slurm;
  v["MASTER_PORT"] = "4242";
  EXPECT_EQ(detect(v).port, 4242);
  EXPECT_EQ(detect(v).address, "n1");
  v["MASTER_ADDR"] = "n1-ib0";
  EXPECT_EQ(detect(v).address, "n1-ib0");
}

TEST(Launch, BatchScriptAndInteractiveShellAreNoSteps) {
  expect_place(detect(test::sbatch), "single", {0, 1, 0, 1, 0});
  Variables shell = test::join(test::sbatch, {{"SLURM_STEP_ID", "4294967290"},
                                              {"SLURM_STEP_NODELIST", "n1"},
                                              {"SLURM_STEP_NUM_TASKS", "1"}});
  expect_place(detect(shell), "single", {0, 1, 0, 1, 0});
}

TEST(Launch, SrunWithPmi2IsSlurm) {
  const Variables v =
      test::join(test::slurm, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"PMI_FD", "9"}});
  expect_place(detect(v), "slurm", {2, 4, 0, 2, 1});
}

TEST(Launch, Plain) {
  const Launch launch = detect(test::plain);
  expect_place(launch, "plain", {0, 2, 0, 1, 0});
  EXPECT_EQ(launch.address, "10.0.0.1");
  EXPECT_EQ(launch.port, 29500);

  Variables local = test::plain;
  local["RANK"] = "1";
  local["MASTER_ADDR"] = "localhost";
  expect_place(detect(local), "plain", {1, 2, 1, 2, 0});

  const Variables placed =
      test::join({{"RANK", "5"}, {"WORLD_SIZE", "6"}},
                 test::join(test::plain, {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}}));
  expect_place(detect(placed), "plain", {5, 6, 1, 2, -1});
  expect_place(detect(test::join(placed, {{"NODE_RANK", "2"}})), "plain", {5, 6, 1, 2, 2});
}

TEST(Launch, PrecedenceWhereLaunchersNest) {
  const RankFile file("launch1\nh1\nh2\n");
  Variables jsrun = test::jsrun;
  jsrun["LSB_DJOB_RANKFILE"] = file.path();
  // Highest first; each list of variables is added to all that stand behind it. torchrun and plain
  // share names, so plain is tried alone.
  const std::vector<std::pair<std::string, Variables>> order{{"tessera", test::ours},
                                                             {"torchrun", test::torchrun},
                                                             {"open_mpi", test::open_mpi},
                                                             {"pmi", test::hydra},
                                                             {"jsm", jsrun},
                                                             {"slurm", test::slurm},
                                                             {"plain", test::plain}};
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t j = i + 1; j < order.size(); ++j) {
      EXPECT_EQ(detect(test::join(order[i].second, order[j].second)).launcher, order[i].first)
          << "beside " << order[j].first;
    }
  }
  EXPECT_EQ(detect(test::join(test::torchrun, test::sbatch)).launcher, "torchrun");
  EXPECT_EQ(detect(test::join(test::open_mpi, test::sbatch)).launcher, "open_mpi");
}

TEST(LaunchOverrides, CodeReplacesTheEnvironment) {
  LaunchOverrides code;
  code.rank = 1;
  code.world_size = 2;
  code.address = "127.0.0.1";
  code.port = 5000;
  const Launch launch = detect({{"RANK", "not read"}}, code);
  expect_place(launch, "code", {1, 2, 1, 2, 0});
  EXPECT_EQ(launch.port, 5000);

  code.address = "node1";
  expect_place(detect({}, code), "code", {1, 2, 0, 1, -1});
  code.local_rank = 1;
  code.local_size = 2;
  expect_place(detect({}, code), "code", {1, 2, 1, 2, 0});

  code.address.reset();
  code.port.reset();
  EXPECT_THROW(require_rendezvous(detect({}, code)), ConfigurationError);
}

TEST(LaunchOverrides, TheSecretOfTheEnvironmentHoldsForAPlaceGivenInCode) {
  LaunchOverrides code;
  code.rank = 1;
  code.world_size = 2;
  const Variables variables{{"TESSERA_SECRET", "0123456789abcdef"}, {"PMI_SHARED_SECRET", "x"}};
  const Launch launch = detect(variables, code);
  EXPECT_EQ(launch.secret, "0123456789abcdef");
  EXPECT_EQ(launch.origin.at("secret"), "TESSERA_SECRET");
  code.secret = "fedcba9876543210";
  EXPECT_EQ(detect(variables, code).secret, "fedcba9876543210");
}

TEST(LaunchOverrides, SingleValuesGoOnTopOfTheLauncher) {
  LaunchOverrides code;
  code.port = 7777;
  const Launch launch = detect(test::torchrun, code);
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.port, 7777);
  EXPECT_FALSE(launch.agent_serves_store) << "the agent serves another port";
  EXPECT_EQ(launch.origin.at("port"), "given in code");
}

TEST(LaunchOverrides, AreValidated) {
  auto refused = [](auto change) {
    LaunchOverrides code;
    code.rank = 0;
    code.world_size = 4;
    code.address = "node1";
    code.port = 5000;
    change(code);
    EXPECT_THROW(detect_launch({}, code), ConfigurationError);
  };
  refused([](auto& c) { c.rank = 4; });
  refused([](auto& c) { c.rank = -1; });
  refused([](auto& c) { c.world_size = 0; });
  refused([](auto& c) { c.local_size = 5; });
  refused([](auto& c) { c.local_rank = 1; });
  refused([](auto& c) { c.node_rank = -2; });
  refused([](auto& c) { c.port = 65536; });
  refused([](auto& c) { c.port = 0; });
  refused([](auto& c) { c.address = ""; });
  refused([](auto& c) { c.ranks_per_host = {{2, 1}}; });
  refused([](auto& c) { c.ranks_per_host = {{5, -1}}; });
  refused([](auto& c) {
    c.ranks_per_host = {{2, 2}};
    c.hosts = {{"a"}};
  });
  refused([](auto& c) {
    c.ranks_per_host = {{2, 2}};
    c.node_rank = 2;
  });
  refused([](auto& c) {
    c.ranks_per_host = {{2, 2}};
    c.node_rank = 1;
    c.local_size = 1;
  });
}

TEST(LaunchOverrides, UnequalHostsAreFine) {
  LaunchOverrides code;
  code.rank = 4;
  code.world_size = 5;
  code.address = "a";
  code.port = 5000;
  code.hosts = {{"a", "b", "c"}};
  code.ranks_per_host = {{3, 0, 2}};
  code.node_rank = 2;
  code.local_rank = 1;
  code.local_size = 2;
  expect_place(detect({}, code), "code", {4, 5, 1, 2, 2});
}

TEST(LaunchSecret, ComesFromTheUserOrTheLauncher) {
  const std::string own = "a secret of the user's", job = "834dcaca0e416643-f801834bd3a530b7";
  Variables plain{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(detect(plain).secret, "");
  // of another launcher
  plain["OMPI_MCA_orte_precondition_transports"] = job;
  EXPECT_EQ(detect(plain).secret, "");
  plain["TESSERA_SECRET"] = own;
  EXPECT_EQ(detect(plain).secret, own);
  Variables mpi{{"OMPI_COMM_WORLD_RANK", "1"},
                {"OMPI_COMM_WORLD_SIZE", "2"},
                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                {"OMPI_MCA_orte_precondition_transports", job}};
  EXPECT_EQ(detect(mpi).secret, job);
  mpi["TESSERA_SECRET"] = own;
  EXPECT_EQ(detect(mpi).secret, own);
  EXPECT_EQ(to_text(detect(mpi)).find(own), std::string::npos);
  mpi["TESSERA_SECRET"] = "short";
  EXPECT_THROW(detect(mpi), ConfigurationError);
  mpi["TESSERA_SECRET"] = "none";
  EXPECT_EQ(detect(mpi).secret, "none");
  // Alone it makes no launch.
  expect_place(detect({{"TESSERA_SECRET", own}}), "single", {0, 1, 0, 1, 0});
  LaunchOverrides code;
  code.secret = own;
  EXPECT_EQ(detect(plain, code).secret, own);
}

TEST(LaunchSecret, IsAnotherOneEachTime) {
  const std::string one = new_secret(), other = new_secret();
  EXPECT_EQ(one.size(), 32u);
  EXPECT_EQ(one.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(one, other);
}

TEST(Environment, OfProcessHoldsItsVariablesAndHost) {
  ASSERT_EQ(setenv("TESSERA_TEST_VARIABLE", "a=b", 1), 0);
  const Environment environment = Environment::of_process();
  EXPECT_EQ(environment.get("TESSERA_TEST_VARIABLE"), "a=b");
  EXPECT_FALSE(environment.get("TESSERA_TEST_ABSENT"));
  EXPECT_FALSE(environment.hostname.empty());
}

}  // namespace
}  // namespace tessera
