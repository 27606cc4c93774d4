// `tessera run`: what the ranks are told, and what becomes of their output.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "launcher_run.h"
#include "process.h"
#include "tessera/launch/internal/cores.h"

namespace tessera::test {
namespace {

// The lines of one rank, without their prefix.
Words lines_of_rank(const std::string& text, const std::string& prefix) {
  Words lines;
  for (const auto& line : lines_of(text)) {
    if (line.rfind(prefix, 0) == 0) lines.push_back(line.substr(prefix.size()));
  }
  return lines;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(LauncherEnvironment, EveryRankIsToldItsPlace) {
  for (int ranks : {1, 2, 3, 4}) {
    Process run(command(ranks, {},
                        {"env=TESSERA_RANK", "env=TESSERA_WORLD_SIZE", "env=TESSERA_LOCAL_RANK",
                         "env=TESSERA_LOCAL_SIZE", "env=TESSERA_NODE_RANK", "env=TESSERA_ADDRESS",
                         "env=TESSERA_PORT", "env=RANK", "env=WORLD_SIZE", "env=LOCAL_RANK",
                         "env=LOCAL_WORLD_SIZE", "env=MASTER_ADDR", "env=MASTER_PORT"}));
    ASSERT_EQ(run.finish(), 0) << run.err();
    std::set<std::string> ports;
    for (int r = 0; r < ranks; ++r) {
      Words lines = lines_of_rank(run.out(), "[" + std::to_string(r) + "] ");
      ASSERT_EQ(lines.size(), 13u) << run.out();
      const std::string me = std::to_string(r), all = std::to_string(ranks);
      ports.insert(lines[6].substr(lines[6].find('=') + 1));
      EXPECT_EQ(lines, (Words{"TESSERA_RANK=" + me, "TESSERA_WORLD_SIZE=" + all,
                              "TESSERA_LOCAL_RANK=" + me, "TESSERA_LOCAL_SIZE=" + all,
                              "TESSERA_NODE_RANK=0", "TESSERA_ADDRESS=127.0.0.1",
                              "TESSERA_PORT=" + *ports.begin(), "RANK=" + me, "WORLD_SIZE=" + all,
                              "LOCAL_RANK=" + me, "LOCAL_WORLD_SIZE=" + all,
                              "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + *ports.begin()}));
    }
    EXPECT_EQ(ports.size(), 1u);
  }
}

TEST(LauncherEnvironment, IsRecognised) {
  Process run(command(3, {}, {"launch"}));
  ASSERT_EQ(run.finish(), 0) << run.err();
  for (int r = 0; r < 3; ++r) {
    const Words lines = lines_of_rank(run.out(), "[" + std::to_string(r) + "] ");
    ASSERT_GE(lines.size(), 3u);
    EXPECT_NE(lines[0].find("tessera"), std::string::npos);
    EXPECT_NE(lines[1].find("(TESSERA_RANK=" + std::to_string(r) + ")"), std::string::npos);
  }
}

TEST(LauncherEnvironment, AnOuterLaunchersNumbersAreNotInherited) {
  Process run(command(2, {},
                      {"env=TORCHELASTIC_USE_AGENT_STORE", "env=OMPI_COMM_WORLD_RANK",
                       "env=PMI_RANK", "env=PMIX_RANK", "env=SLURM_PROCID",
                       "env=JSM_NAMESPACE_RANK", "env=RANK", "env=SLURM_JOB_ID", "launch"}),
              {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
               {"OMPI_COMM_WORLD_RANK", "7"},
               {"PMI_RANK", "7"},
               {"PMIX_RANK", "7"},
               {"SLURM_PROCID", "7"},
               {"JSM_NAMESPACE_RANK", "7"},
               {"RANK", "7"},
               {"SLURM_JOB_ID", "55"}});
  ASSERT_EQ(run.finish(), 0) << run.err();
  const Words lines = lines_of_rank(run.out(), "[1] ");
  ASSERT_GE(lines.size(), 8u);
  EXPECT_EQ(Words(lines.begin(), lines.begin() + 8),
            (Words{"TORCHELASTIC_USE_AGENT_STORE unset", "OMPI_COMM_WORLD_RANK unset",
                   "PMI_RANK unset", "PMIX_RANK unset", "SLURM_PROCID unset",
                   "JSM_NAMESPACE_RANK unset", "RANK=1", "SLURM_JOB_ID=55"}));
}

TEST(LauncherEnvironment, ThePortIsFreeForAListener) {
  Process run(command(2, {}, {"@0:listen"}));
  ASSERT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), "[0] listening\n");
}

TEST(LauncherEnvironment, ThreadsAreSharedOut) {
  const int usable = cpu_budget().usable();
  auto threads = [](int ranks, const Words& options,
                    const std::map<std::string, std::string>& variables = {}) {
    Process run(command(ranks, options, {"env=OMP_NUM_THREADS"}), variables);
    EXPECT_EQ(run.finish(), 0);
    return lines_of_rank(run.out(), "[0] ").at(0);
  };
  EXPECT_EQ(threads(1, {}), "OMP_NUM_THREADS=" + std::to_string(usable));
  EXPECT_EQ(threads(2, {}), "OMP_NUM_THREADS=" + std::to_string(std::max(1, usable / 2)));
  EXPECT_EQ(threads(usable + 1, {}), "OMP_NUM_THREADS=1");
  EXPECT_EQ(threads(2, {"--threads", "7"}), "OMP_NUM_THREADS=7");
  EXPECT_EQ(threads(2, {"--threads", "off"}), "OMP_NUM_THREADS unset");
  EXPECT_EQ(threads(2, {}, {{"OMP_NUM_THREADS", "3"}}), "OMP_NUM_THREADS=3")
      << "what the user set stays";
  EXPECT_EQ(threads(2, {"--threads", "7"}, {{"OMP_NUM_THREADS", "3"}}), "OMP_NUM_THREADS=7")
      << "but an option wins";
}

TEST(LauncherEnvironment, TheAllocatorIsChosen) {
  const auto told = [](const Words& options, const std::string& name,
                       const std::map<std::string, std::string>& variables = {}) {
    Process run(command(1, options, {"env=" + name}), variables);
    EXPECT_EQ(run.finish(), 0) << run.err();
    return lines_of_rank(run.out(), "[0] ").at(0);
  };
  EXPECT_EQ(told({}, "GLIBC_TUNABLES"), "GLIBC_TUNABLES unset") << "never without being asked";
  EXPECT_EQ(told({"--allocator", "system"}, "GLIBC_TUNABLES"), "GLIBC_TUNABLES unset");
#ifdef __GLIBC__
  const std::string kept = told({"--allocator", "keep"}, "GLIBC_TUNABLES");
  EXPECT_NE(kept.find("glibc.malloc.trim_threshold="), std::string::npos) << kept;
  EXPECT_EQ(told({"--allocator", "keep"}, "GLIBC_TUNABLES",
                 {{"GLIBC_TUNABLES", "glibc.malloc.arena_max=3"}}),
            kept + ":glibc.malloc.arena_max=3")
      << "what the user set stays, and comes last";
#endif
#ifndef __SANITIZE_ADDRESS__  // whose own library insists on being the first
  // A shared library that is there: the C library itself, loaded first, changes nothing.
  std::string file;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; file.empty() && std::getline(maps, line);) {
    if (line.find("/libc") != std::string::npos) file = line.substr(line.find('/'));
  }
  ASSERT_FALSE(file.empty());
  EXPECT_EQ(told({"--allocator", file}, "LD_PRELOAD"), "LD_PRELOAD=" + file);
  EXPECT_EQ(told({"--allocator", file}, "LD_PRELOAD", {{"LD_PRELOAD", file}}),
            "LD_PRELOAD=" + file + ":" + file);
#endif
}

// The dynamic linker would only warn, and the ranks would run with the system's.
TEST(LauncherEnvironment, AnAllocatorThatCannotBeLoadedIsRefused) {
  for (const std::string wrong :
       {"jemalloc", "/nowhere/liballocator.so", "/proc/self/status", "/"}) {
    Process run(command(1, {"--allocator", wrong}, {"env=LD_PRELOAD"}));
    EXPECT_EQ(run.finish(), 2) << wrong;
    EXPECT_NE(run.err().find("--allocator " + wrong), std::string::npos) << run.err();
  }
}

TEST(LauncherEnvironment, BindingGivesEachRankItsShare) {
  const auto cpus = cpu_budget().cpus;
  for (int ranks : {1, 2, 3}) {
    Process run(command(ranks, {"--bind", "cores"}, {"affinity"}));
    ASSERT_EQ(run.finish(), 0) << run.err();
    const auto shares = share_cpus(cpus, ranks);
    for (int r = 0; r < ranks; ++r) {
      std::vector<int> share = shares[r];
      std::ranges::sort(share);
      std::string expected = "cpus";
      for (int cpu : share) expected += " " + std::to_string(cpu);
      EXPECT_EQ(lines_of_rank(run.out(), "[" + std::to_string(r) + "] "), Words{expected});
    }
  }
}

// Of one host with four devices, of which the first two and the last two are near each other.
Words map_files(const Folder& folder) {
  std::ofstream(folder.path() / "host.yaml")
      << "hosts: [{name: h, devices: 4, link: far, links: [{between: [0, 1], class: near}, "
         "{between: [2, 3], class: near}]}]\n"
         "device_links: [{name: far, latency: 1us, bandwidth: 1GB/s}, {name: near, latency: 1us, "
         "bandwidth: 100GB/s}]\n";
  std::ofstream(folder.path() / "step.yaml")
      << "mesh: {data: 2, model: 2}\n"
         "traffic: [{axes: [data], collective: all_reduce, bytes: 64000000}]\n";
  return {"--map", folder.path() / "step.yaml", "--topology", folder.path() / "host.yaml"};
}

TEST(LauncherMap, RanksAreOnTheSlotsOfTheirTraffic) {
  const Folder folder;
  const Words options = map_files(folder);
  Process run(command(
      4, options,
      {"env=TESSERA_RANK", "env=TESSERA_LOCAL_RANK", "env=RANK", "env=LOCAL_RANK", "affinity"}));
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_NE(run.err().find("ranks on slots [0, 2, 1, 3]"), std::string::npos) << run.err();
  const std::vector<int> slots{0, 2, 1, 3};
  const auto shares = share_cpus(cpu_budget().cpus, 4);
  for (int r = 0; r < 4; ++r) {
    const auto rank = std::to_string(r), slot = std::to_string(slots[r]);
    std::vector<int> share = shares[slots[r]];
    std::ranges::sort(share);
    std::string cpus = "cpus";
    for (const int cpu : share) cpus += " " + std::to_string(cpu);
    EXPECT_EQ(lines_of_rank(run.out(), "[" + rank + "] "),
              (Words{"TESSERA_RANK=" + rank, "TESSERA_LOCAL_RANK=" + slot, "RANK=" + rank,
                     "LOCAL_RANK=" + slot, cpus}));
  }
}

TEST(LauncherMap, BindsNothingWhereThatIsSaid) {
  const Folder folder;
  const auto all = cpu_budget().cpus;
  for (const std::string bind : {"none", "cores"}) {
    Words options = map_files(folder);
    options.insert(options.end(), {"--bind", bind});
    Process run(command(4, options, {"env=LOCAL_RANK", "affinity"}));
    ASSERT_EQ(run.finish(), 0) << run.err();
    const auto lines = lines_of_rank(run.out(), "[1] ");
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0], "LOCAL_RANK=2");
    const auto cpus = std::ranges::count(lines[1], ' ');
    EXPECT_EQ(cpus, static_cast<std::ptrdiff_t>(bind == "none" ? all.size()
                                                               : share_cpus(all, 4)[2].size()))
        << lines[1];
  }
}

TEST(LauncherMap, WhatDoesNotFitIsRefused) {
  const Folder folder;
  const Words fine = map_files(folder);
  const auto refuses = [&](int ranks, const Words& options, int status, const std::string& why) {
    Process run(command(ranks, options, {"print=started"}));
    EXPECT_EQ(run.finish(), status) << run.err();
    EXPECT_NE(run.err().find(why), std::string::npos) << run.err();
    EXPECT_EQ(run.out(), "");
  };
  refuses(2, fine, 2, "a mesh of 4 ranks, but -n is 2");
  refuses(4, {"--map", folder.path() / "absent.yaml"}, 2, "absent.yaml");
  refuses(4, {"--topology", fine[3]}, 2, "--map");
  std::ofstream(folder.path() / "two.yaml") << "hosts: 2x2\n";
  refuses(4, {"--map", fine[1], "--topology", folder.path() / "two.yaml"}, 2, "one host with 4");
  std::ofstream(folder.path() / "wrong.yaml")
      << "mesh: {data: 4}\ntraffic: [{axes: [data], collective: send, bytes: .inf}]\n";
  refuses(4, {"--map", folder.path() / "wrong.yaml"}, 2, "wrong.yaml");
  // More ranks than any host has cores, or no hwloc to count them.
  std::ofstream(folder.path() / "many.yaml") << "mesh: {data: 100000}\ntraffic: []\n";
  refuses(100000, {"--map", folder.path() / "many.yaml"}, 125, "--topology FILE");
}

TEST(LauncherEnvironment, OversubscriptionIsReported) {
  const int usable = cpu_budget().usable();
  Process more(command(usable + 1, {}, {}));
  ASSERT_EQ(more.finish(), 0);
  EXPECT_NE(more.err().find(std::to_string(usable + 1) + " ranks on " + std::to_string(usable)),
            std::string::npos)
      << more.err();
  Process fitting(command(usable, {}, {}));
  ASSERT_EQ(fitting.finish(), 0);
  EXPECT_EQ(fitting.err(), "");
}

TEST(LauncherOutput, StreamsStayApartAndLinesArePrefixed) {
  Process run(command(2, {}, {"print=to out", "error=to err", "part=no line end"}));
  ASSERT_EQ(run.finish(), 0);
  for (const char* prefix : {"[0] ", "[1] "}) {
    EXPECT_EQ(lines_of_rank(run.out(), prefix), (Words{"to out", "no line end"}));
    EXPECT_EQ(lines_of_rank(run.err(), prefix), Words{"to err"});
  }
  EXPECT_EQ(run.out().back(), '\n');
}

TEST(LauncherOutput, PrefixesHaveOneWidth) {
  Process run(command(11, {}, {"print=x"}));
  ASSERT_EQ(run.finish(), 0);
  Words lines = lines_of(run.out());
  std::ranges::sort(lines);
  ASSERT_EQ(lines.size(), 11u);
  EXPECT_EQ(lines.front(), "[ 0] x");
  EXPECT_EQ(lines.back(), "[10] x");
}

TEST(LauncherOutput, NothingIsLostOrTornWhenAllWriteMuch) {
  constexpr int count = 50000;
  Process run(command(4, {}, {"lines=50000"}));
  ASSERT_EQ(run.finish(), 0);
  for (int r = 0; r < 4; ++r) {
    const Words lines = lines_of_rank(run.out(), "[" + std::to_string(r) + "] ");
    ASSERT_EQ(lines.size(), static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) ASSERT_EQ(lines[i], "line " + std::to_string(i));
  }
}

TEST(LauncherOutput, LongLines) {
  Process run(command(2, {}, {"long=1000000", "long=3000000"}));
  ASSERT_EQ(run.finish(), 0);
  for (const char* prefix : {"[0] ", "[1] "}) {
    const Words lines = lines_of_rank(run.out(), prefix);
    ASSERT_GE(lines.size(), 3u);
    EXPECT_EQ(lines[0].size(), 1000000u) << "a line below the limit stays whole";
    std::size_t rest = 0;
    for (std::size_t i = 1; i < lines.size(); ++i) rest += lines[i].size();
    EXPECT_EQ(rest, 3000000u);
  }
}

TEST(LauncherOutput, ByRankIsInRankOrder) {
  Process run(
      command(3, {"--output", "by-rank"}, {"lines=20000", "@0:print=last of 0", "error=to err"}));
  ASSERT_EQ(run.finish(), 0);
  std::string expected;
  for (int r = 0; r < 3; ++r) {
    const std::string prefix = "[" + std::to_string(r) + "] ";
    for (int i = 0; i < 20000; ++i) expected += prefix + "line " + std::to_string(i) + "\n";
    if (r == 0) expected += prefix + "last of 0\n";
  }
  EXPECT_TRUE(run.out() == expected);
  Words error_lines = lines_of(run.err());
  error_lines.erase(std::remove_if(error_lines.begin(), error_lines.end(),
                                   [](const auto& l) { return l[0] != '['; }),
                    error_lines.end());
  EXPECT_EQ(error_lines, (Words{"[0] to err", "[1] to err", "[2] to err"}));
}

TEST(LauncherOutput, ByRankKeepsNoMoreThanItsLimitAndBlocksNoRank) {
  const Folder folder;
  const std::string meeting = (folder.path() / "meeting").string();
  ASSERT_EQ(mkfifo(meeting.c_str(), 0600), 0);
  // Rank 0 waits for rank 1, which writes more than is kept: holding it up would never end.
  Process run(command(2, {"--output", "by-rank", "--keep", "1"},
                      {"@1:lines=300000", "meet=" + meeting, "print=done"}));
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_NE(run.err().find("no longer in the order of ranks: more than 1048576 bytes"),
            std::string::npos)
      << run.err();
  const Words lines = lines_of_rank(run.out(), "[1] ");
  ASSERT_EQ(lines.size(), 300001u);
  for (int i = 0; i < 300000; ++i) ASSERT_EQ(lines[i], "line " + std::to_string(i));
  EXPECT_EQ(lines_of_rank(run.out(), "[0] "), Words{"done"});
}

TEST(LauncherOutput, ALogThatIsAPipeWithoutAReaderIsRefused) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder.path() / "rank-0.out").c_str(), 0600), 0);
  Process run(command(1, {"--log-dir", folder.path().string()}, {}));
  EXPECT_EQ(run.finish(std::chrono::seconds(20)), 125);
}

TEST(LauncherEnvironment, ManyRanksDoNotNeedAHighLimitOfDescriptors) {
  Process run(in_shell("ulimit -Sn 24; exec \"$@\"", command(12, {}, {"descriptors"})));
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_EQ(lines_of_rank(run.out(), "[11] "), Words{"descriptors 24"}) << "the ranks keep theirs";
}

TEST(LauncherEnvironment, AHostWithoutIPv4MeetsAtItsOtherLoopback) {
  const std::string no_ipv4 =
      "unshare -rn sh -c 'ip link set lo up && ip -6 addr show dev lo | grep -q ::1 && ip -4 addr "
      "flush dev lo && \"$@\"' sh ";
  Process possible(in_shell(no_ipv4 + "\"$@\"", {"true"}));
  if (possible.finish() != 0) GTEST_SKIP() << "no such namespace here: " << possible.err();
  Process run(in_shell(no_ipv4 + "\"$@\"", command(1, {}, {"env=MASTER_ADDR"})));
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_EQ(run.out(), "[0] MASTER_ADDR=::1\n");
  Process open_mpi(in_shell(no_ipv4 + "\"$@\"", {TESSERA_HELPER, "launch"}),
                   {{"OMPI_COMM_WORLD_RANK", "0"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  ASSERT_EQ(open_mpi.finish(), 0) << open_mpi.err();
  EXPECT_NE(open_mpi.out().find("::1"), std::string::npos) << open_mpi.out();
}

TEST(LauncherOutput, LogFilesHoldTheBytesOfEachRank) {
  const Folder folder;
  const auto logs = folder.path() / "made" / "by the launcher";
  Process run(command(2, {"--log-dir", logs.string()},
                      {"print=out", "@1:error=err of 1", "part=open end"}));
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_EQ(read_file(logs / "rank-0.out"), "out\nopen end");
  EXPECT_EQ(read_file(logs / "rank-1.out"), "out\nopen end");
  EXPECT_EQ(read_file(logs / "rank-0.err"), "");
  EXPECT_EQ(read_file(logs / "rank-1.err"), "err of 1\n");
  EXPECT_NE(run.out().find("[1] open end"), std::string::npos) << "the terminal gets it too";
}

TEST(LauncherOutput, ALogFolderThatCannotBeIsRefused) {
  Process run(command(1, {"--log-dir", "/proc/no/such"}, {}));
  EXPECT_EQ(run.finish(), 125);
  EXPECT_NE(run.err().find("/proc/no/such"), std::string::npos);
}

TEST(LauncherArguments, WhatFollowsTheDashesBelongsToTheProgram) {
  Process run(
      {TESSERA_PROGRAM, "run", "-n", "1", "--", "printf", "%s|", "run", "-n", "--help", "--", "x"});
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_EQ(run.out(), "[0] run|-n|--help|--|x|\n");
}

TEST(LauncherArguments, HabitsOfOtherLaunchersWork) {
  for (const Words& ranks : {Words{"-np", "2"}, Words{"--np", "2"}, Words{"--nproc-per-node", "2"},
                             Words{"--nproc-per-node=2"}, Words{"--nproc_per_node", "2"}}) {
    Words all{TESSERA_PROGRAM, "run"};
    all.insert(all.end(), ranks.begin(), ranks.end());
    all.insert(all.end(), {"--", "sh", "-c", "echo $TESSERA_WORLD_SIZE $1", "sh", "-np"});
    Process run(all);
    ASSERT_EQ(run.finish(), 0) << ranks[0] << ": " << run.err();
    EXPECT_NE(run.out().find("[1] 2 -np"), std::string::npos) << run.out();
  }
}

TEST(LauncherArguments, TheProgramSaysWhatItIsAndKnows) {
  Process version({TESSERA_PROGRAM, "--version"});
  EXPECT_EQ(version.finish(), 0);
  EXPECT_EQ(version.out().rfind("tessera 0.", 0), 0u) << version.out();
  Process alone({TESSERA_PROGRAM});
  EXPECT_EQ(alone.finish(), 0);
  EXPECT_NE(alone.out().find("doctor"), std::string::npos) << alone.out();
  Process wrong({TESSERA_PROGRAM, "rum", "-n", "2"});
  EXPECT_EQ(wrong.finish(), 2);
  EXPECT_NE(wrong.err().find("'rum' is no command; the nearest is 'run'"), std::string::npos)
      << wrong.err();
}

TEST(LauncherArguments, MistakesAreRefusedWithStatus2) {
  for (const Words& words :
       {Words{"run"}, Words{"run", "-n", "2"}, Words{"run", "-n", "0", "--", "true"},
        Words{"run", "-n", "-1", "--", "true"}, Words{"run", "-n", "x", "--", "true"},
        Words{"run", "-n", "2", "--timeout", "-1", "--", "true"},
        Words{"run", "-n", "2", "--bind", "sockets", "--", "true"},
        Words{"run", "-n", "2", "--nonsense", "--", "true"}, Words{"fly"}}) {
    Words all{TESSERA_PROGRAM};
    all.insert(all.end(), words.begin(), words.end());
    Process run(all);
    EXPECT_EQ(run.finish(), 2);
    EXPECT_FALSE(run.err().empty());
  }
  Process threads(command(1, {"--threads", "0"}, {}));
  EXPECT_EQ(threads.finish(), 2);
  EXPECT_NE(threads.err().find("--threads 0"), std::string::npos);
}

}  // namespace
}  // namespace tessera::test
