// The rank file that `tessera plan` writes, read by a real mpirun: each rank runs on the core and
// on the host that the file says.

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <map>
#include <sstream>

#include "../support/folder.h"
#include "process.h"
#include "two_hosts.h"

namespace tessera::test {
namespace {

using ::tessera::testing::contents;
using ::tessera::testing::Folder;
using ::tessera::testing::put;

struct Seat {
  std::string host;
  int slot = -1;
  bool operator==(const Seat&) const = default;
};

/// "rank 3=host slot=2", by rank.
std::map<int, Seat> seats_of(const std::string& file) {
  std::map<int, Seat> seats;
  std::string words = file;
  for (char& c : words) c = c == '=' ? ' ' : c;
  std::istringstream in(words);
  std::string rank_word, slot_word;
  int rank = 0;
  for (Seat seat; in >> rank_word >> rank >> seat.host >> slot_word >> seat.slot;)
    seats[rank] = seat;
  return seats;
}

/// Runs `tessera plan` on hosts of `devices` cores; what it wrote.
std::map<int, Seat> plan(const Folder& folder, const std::vector<std::string>& hosts, int devices,
                         const std::vector<std::string>& how) {
  std::string topology;
  for (const auto& host : hosts)
    topology += (topology.empty() ? "" : ",") +
                ("{\"name\": \"" + host + "\", \"devices\": " + std::to_string(devices) + "}");
  put(folder / "hosts.json", "{\"hosts\": [" + topology + "]}");
  std::vector<std::string> words{TESSERA_PROGRAM,       "plan",       "--topology",
                                 folder / "hosts.json", "--rankfile", folder / "ranks.txt"};
  words.insert(words.end(), how.begin(), how.end());
  Process run(words);
  EXPECT_EQ(run.finish(), 0) << run.err();
  return seats_of(contents(folder / "ranks.txt"));
}

std::vector<std::string> mpirun(const Folder& folder) {
  std::vector<std::string> words{TESSERA_MPIRUN, "--rankfile", folder / "ranks.txt"};
  if (geteuid() == 0) words.insert(words.begin() + 1, "--allow-run-as-root");
  return words;
}

/// What each rank said in a line "seat RANK HOST CPU CPU ...": its host, and its CPUs.
std::map<int, std::pair<std::string, std::vector<int>>> said(const std::string& text) {
  std::map<int, std::pair<std::string, std::vector<int>>> all;
  for (const auto& line : lines_of(text)) {
    std::istringstream in(line);
    std::string word, host;
    int rank = 0, cpu = 0;
    if (!(in >> word >> rank >> host) || word != "seat") continue;
    all[rank].first = host;
    for (in >> word; in >> cpu;) all[rank].second.push_back(cpu);
  }
  return all;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return CPU_COUNT(&set);
}

/// Whether core number i is CPU number i: one thread a core, one package, none taken away.
bool cores_are_cpus() {
  for (int cpu = 0; cpu < usable_cpus(); ++cpu) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    if (contents(folder + "thread_siblings_list") != std::to_string(cpu) + "\n" ||
        contents(folder + "physical_package_id") != "0\n")
      return false;
  }
  return true;
}

TEST(RankFile, PutsEachRankOnItsCore) {
  if (usable_cpus() < 2 || !cores_are_cpus())
    GTEST_SKIP() << "needs two usable cores, numbered as CPUs are (one thread a core)";
  const Folder folder;
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof host - 1), 0);
  // The ranks in reverse: what mpirun does by itself is another order.
  put(folder / "own.txt", std::string("rank 0=") + host + " slot=1\nrank 1=" + host + " slot=0\n");
  const auto seats = plan(folder, {host}, 2, {"--mesh", "data=2", "--mapping", folder / "own.txt"});
  ASSERT_EQ(seats, (std::map<int, Seat>{{0, {host, 1}}, {1, {host, 0}}}));
  auto words = mpirun(folder);
  words.insert(words.end(), {"-n", "2", "sh", "-c",
                             std::string("echo seat $OMPI_COMM_WORLD_RANK $(hostname) $(") +
                                 TESSERA_HELPER + " affinity)"});
  Process run(words);
  ASSERT_EQ(run.finish(), 0) << run.err();
  const auto found = said(run.out());
  ASSERT_EQ(found.size(), 2u) << run.out();
  for (const auto& [rank, seat] : seats)
    EXPECT_EQ(found.at(rank).second, std::vector<int>{seat.slot}) << "rank " << rank << run.out();
}

TEST(RankFile, PutsEachRankOnItsHost) {
  if (const auto why = obstacle(); !why.empty()) GTEST_SKIP() << why;
  if (usable_cpus() < 2) GTEST_SKIP() << "needs two cores on each host";
  const TwoHosts hosts;
  ASSERT_TRUE(hosts.ok());
  const Folder folder;
  // The axis with the traffic is the outer one: the plan has to take neighbours apart.
  const auto seats =
      plan(folder, {TwoHosts::address(0), TwoHosts::address(1)}, 2,
           {"--mesh", "model=2,data=2", "--traffic", "model=all_reduce:512MB,data=all_reduce:1MB"});
  ASSERT_EQ(seats.size(), 4u);
  EXPECT_EQ(seats.at(0).host, seats.at(2).host) << "model";
  EXPECT_EQ(seats.at(1).host, seats.at(3).host) << "model";
  EXPECT_NE(seats.at(0).host, seats.at(1).host) << "data";
  // What mpirun uses for ssh: the other host is another namespace.
  put(folder / "agent", "#!/bin/sh\nshift\nexec nsenter --net=/run/netns/" + hosts.space(1) +
                            " unshare --uts sh -c \"hostname other; $*\"\n");
  std::vector<std::string> words{"nsenter", "--net=/run/netns/" + hosts.space(0)};
  for (const auto& word : mpirun(folder)) words.push_back(word);
  words.insert(
      words.end(),
      {"--mca", "plm_rsh_agent", "sh " + (folder / "agent"), "--host",
       TwoHosts::address(0) + ":2," + TwoHosts::address(1) + ":2", "-n", "4", "sh", "-c",
       std::string("echo seat $OMPI_COMM_WORLD_RANK "
                   "$(ip -4 -o addr show | grep -o '10[.]213[.]77[.][12]/' | tr -d /) $(") +
           TESSERA_HELPER + " affinity)"});
  Process run(words);
  ASSERT_EQ(run.finish(), 0) << run.err();
  const auto found = said(run.out());
  ASSERT_EQ(found.size(), 4u) << run.out();
  for (const auto& [rank, seat] : seats) {
    EXPECT_EQ(found.at(rank).first, seat.host) << "rank " << rank;
    if (cores_are_cpus()) {
      EXPECT_EQ(found.at(rank).second, std::vector<int>{seat.slot}) << "rank " << rank;
    }
  }
}

}  // namespace
}  // namespace tessera::test
