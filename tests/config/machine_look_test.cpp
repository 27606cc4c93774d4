// What the ranks of a job find of their machines with hwloc, Slurm's table or a file, by
// find_topology() with machine_look(), on ranks of hosts that are said to be others.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "../support/ranks.h"
#include "refused.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/find_topology.h"
#include "tessera/config/errors.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/config/topology_file.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/mesh_traffic.h"

namespace tessera::test {
namespace {

using Names = std::vector<std::string>;
using Slots = std::vector<int>;

class MachineLooks : public ::testing::Test {
 protected:
  MachineLooks()
      : folder_(std::filesystem::path(::testing::TempDir()) / concat("machines-", ::getpid())) {
    std::filesystem::create_directories(folder_);
    // hwloc takes the machine of this file for the one that it runs on.
    ::setenv("HWLOC_XMLFILE", TESSERA_TEST_DATA "/two_packages.xml", 1);
  }
  ~MachineLooks() override {
    ::unsetenv("HWLOC_XMLFILE");
    std::filesystem::remove_all(folder_);
  }

  std::string put(const std::string& name, const std::string& text) const {
    const auto path = folder_ / name;
    std::ofstream(path) << text;
    return path;
  }

  /// What every rank finds where rank r is on host of_ranks[r], which must be the same.
  void find(const Names& of_ranks, const MachineSources& sources,
            const std::function<void(const FoundTopology&)>& see) const {
    on_ranks(static_cast<int>(of_ranks.size()), [&](DistributedManager& manager) {
      // What other ranks than 0 name does not count.
      MachineSources mine = sources;
      if (manager.rank() > 0) mine.file = mine.slurm = "/absent.yaml";
      MachineLook look = machine_look(mine);
      look.host = [name = of_ranks[manager.rank()]] { return name; };
      const FoundTopology found = find_topology(manager, look);
      agree::same(manager.world(), "what was found",
                  concat(format_topology(found.topology, FileFormat::json), list(found.slot_of),
                         list(found.unknown)));
      see(found);
    });
  }

  std::filesystem::path folder_;
};

bool says(const FoundTopology& found, const std::string& part) {
  return std::ranges::any_of(
      found.unknown, [&](const auto& line) { return line.find(part) != Names::value_type::npos; });
}

bool has_hwloc() {
  try {
    live_hwloc_topology(HostDevice::core, "h");
  } catch (const NotAvailable&) {
    return false;
  }
  return true;
}

TEST_F(MachineLooks, TheInsideOfEachHostIsWhatHwlocSees) {
  if (!has_hwloc()) GTEST_SKIP() << "no hwloc in this build";
  const MachineSources none{.slurm = folder_ / "absent"};
  // As many ranks as GPUs: two near each adapter.
  find({"a", "a", "a", "a"}, none, [](const FoundTopology& found) {
    const Host& host = found.topology.hosts[0];
    EXPECT_EQ(host.rail, (Slots{0, 0, 1, 1}));
    ASSERT_EQ(host.links.size(), 2u);
    const auto& classes = found.topology.device_links;
    EXPECT_EQ(classes[host.links[0].link_class].name, "near");
    EXPECT_EQ(classes[host.link_class].name, "far");
    EXPECT_TRUE(says(found, "defaults"));
    EXPECT_EQ(found.unknown.size(), 1u) << list(found.unknown);
  });
  // Hosts of unequal insides: three ranks share the four cores, one has its host to itself.
  find({"a", "b", "a", "a"}, none, [](const FoundTopology& found) {
    ASSERT_EQ(found.topology.hosts.size(), 2u);
    EXPECT_EQ(found.topology.hosts[0].links.size(), 1u);  // cores 0 and 1 of 0, 1, 2
    EXPECT_EQ(found.topology.hosts[1].devices, 1);
    EXPECT_EQ(found.slot_of, (Slots{0, 3, 1, 2}));
    EXPECT_TRUE(says(found, "how the hosts are connected: there is no"));
  });
  find({"a", "a", "a", "a", "a"}, none, [](const FoundTopology& found) {
    EXPECT_EQ(found.topology.slots(), 5);
    EXPECT_TRUE(says(found, "the inside of a: ")) << list(found.unknown);
    EXPECT_TRUE(says(found, "4 cores")) << list(found.unknown);
  });
}

TEST_F(MachineLooks, SlurmsSwitchesStandAboveTheHosts) {
  const std::string tree =
      "SwitchName=l Nodes=a,b\nSwitchName=r Nodes=c\nSwitchName=top Switches=l,r\n";
  find({"a", "b", "c"}, {.slurm = put("topology.conf", tree)}, [](const FoundTopology& found) {
    EXPECT_EQ(found.topology.switches.size(), 3u);
    EXPECT_EQ(found.topology.hosts[0].network, found.topology.hosts[1].network);
    EXPECT_NE(found.topology.hosts[0].network, found.topology.hosts[2].network);
    EXPECT_FALSE(says(found, "connected"));
  });
  // A host that no switch knows, a line that is none, a folder.
  for (const std::string& conf : {put("other.conf", "SwitchName=l Nodes=a,b\n"),
                                  put("broken.conf", "BlockName=x Nodes=a\n"), folder_.string()})
    find({"a", "b", "c"}, {.slurm = conf}, [&](const FoundTopology& found) {
      EXPECT_TRUE(found.topology.switches.empty());
      EXPECT_TRUE(says(found, "how the hosts are connected: " + conf)) << list(found.unknown);
    });
}

TEST_F(MachineLooks, AFileOfRank0StandsForAll) {
  Topology measured = Topology::of_counts({1, 2});
  measured.hosts[0].name = "b";
  measured.hosts[1].name = "a";
  measured.network.bandwidth = 3e9;
  write_topology(measured, folder_ / "measured.yaml");
  const MachineSources file{.file = folder_ / "measured.yaml"};
  // The ranks are found by the names of their hosts, which the file has in another order.
  find({"a", "b", "a"}, file, [&](const FoundTopology& found) {
    EXPECT_EQ(found.topology, measured);
    EXPECT_EQ(found.slot_of, (Slots{1, 0, 2}));
    EXPECT_TRUE(found.unknown.empty()) << list(found.unknown);
  });
  for (const Names& others : {Names{"x", "y", "x"}, Names{"a", "a", "a"}, Names{"b", "b", "a"}})
    find(others, file, [&](const FoundTopology& found) {
      EXPECT_EQ(found.topology, measured);
      EXPECT_EQ(found.slot_of, (Slots{0, 1, 2}));
      EXPECT_TRUE(says(found, "rank r is taken to run on slot r"));
    });
}

TEST_F(MachineLooks, AFileThatIsNoneIsRefusedOnEveryRank) {
  const auto refuses = [&](const MachineSources& sources, const std::string& part) {
    on_ranks(3, [&](DistributedManager& manager) {
      const MachineLook look = machine_look(manager.rank() == 0 ? sources : MachineSources{});
      EXPECT_SAYS(refused<ConfigurationError>([&] { find_topology(manager, look); }), part);
      manager.world().barrier();
      EXPECT_EQ(find_topology(manager, machine_look()).topology.slots(), 3);
    });
  };
  write_topology(Topology::of_counts({2, 2}), folder_ / "four.json");
  refuses({.file = folder_ / "four.json"}, "has 4 slots, and the job 3 ranks");
  refuses({.file = folder_ / "absent.json"}, "absent.json");
  refuses({.file = folder_ / "topology.txt"}, "must end in .json");
  refuses({.file = put("broken.yaml", "hosts: [")}, "broken.yaml");
  refuses({.file = put("wrong.json", R"({"hosts": "1,1,1", "network": {"bandwidth": -1}})")},
          "bandwidth");
}

TEST_F(MachineLooks, WhatAJobWouldGainFollows) {
  if (!has_hwloc()) GTEST_SKIP() << "no hwloc in this build";
  find({"a", "a", "a", "a"}, {}, [](const FoundTopology& found) {
    const Mesh mesh({{"data", 2}, {"model", 2}});
    const std::vector<Traffic> heavy{{{"data"}, Collective::all_reduce, 64e6, 1}};
    const MappingGain gain = mapping_gain(mesh, found, heavy);
    EXPECT_EQ(gain.ranks, (Slots{0, 2, 1, 3}));  // both of a group below one package
    EXPECT_LT(gain.mapped_seconds, gain.seconds);
    EXPECT_EQ(gain.bytes, 0);
  });
}

}  // namespace
}  // namespace tessera::test
