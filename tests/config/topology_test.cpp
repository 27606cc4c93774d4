#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "random_mesh.h"
#include "refused.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/config/internal/plan_request.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"
#include "tessera/config/traffic_file.h"
#include "tessera/mesh/errors.h"

using namespace tessera;

namespace {

constexpr const char* kCluster = R"(
hosts:
  - {name: n0, devices: 4, link: nvlink, rails: [0, 0, 1, 1], switch: rack0}
  - {name: n1, devices: 2, links: [{between: [0, 1], class: nvlink}], switch: rack1}
device_links:
  - {name: pcie, latency: 3us, bandwidth: 25GB/s, shared: true}
  - {name: nvlink, latency: 1us, bandwidth: 200GB/s}
network: {latency: 5us, bandwidth: 12.5GB/s}
cross_rail_latency: 2us
switches:
  - {name: spine}
  - {name: rack0, parent: spine, latency: 1us, uplink_bandwidth: 50GB/s}
  - {name: rack1, parent: spine, latency: 1us, uplink_bandwidth: 50GB/s}
)";

Topology yaml(const std::string& text) {
  return parse_topology(text, FileFormat::yaml, "cluster.yaml");
}

}  // namespace

TEST(TopologyFile, ReadAndWritten) {
  const auto cluster = yaml(kCluster);
  EXPECT_EQ(cluster.slots(), 6);
  EXPECT_EQ(cluster.hosts[0].link_class, 1);
  EXPECT_EQ(cluster.hosts[1].links, (std::vector<DeviceLink>{{0, 1, 1}}));
  EXPECT_EQ(cluster.rail_of(0, 2), 1);
  EXPECT_EQ(cluster.rail_of(1, 1), 0);
  EXPECT_EQ(cluster.switches[2].parent, 0);
  EXPECT_DOUBLE_EQ(cluster.network.latency, 5e-6);
  EXPECT_DOUBLE_EQ(cluster.device_links[0].bandwidth, 25e9);
  EXPECT_TRUE(cluster.device_links[0].shared);
  for (const auto format : {FileFormat::json, FileFormat::yaml})
    EXPECT_EQ(parse_topology(format_topology(cluster, format), format), cluster);
  const std::string path = concat(::testing::TempDir(), "tessera_cluster_", ::getpid(), ".yaml");
  write_topology(cluster, path);
  EXPECT_EQ(read_topology(path), cluster);
  std::remove(path.c_str());
}

TEST(TopologyFile, ShortForms) {
  EXPECT_EQ(parse_hosts("16x8").slots(), 128);
  EXPECT_EQ(parse_hosts("8,8,4").hosts[2].devices, 4);
  EXPECT_EQ(parse_hosts("3").hosts.size(), 1u);
  EXPECT_EQ(yaml("hosts: 2x3").hosts.size(), 2u);
  for (const char* bad : {"", "x8", "8x", "0x8", "8,,4", "-1", "1.5", "9999999999", "65536x65536"})
    EXPECT_ANY_THROW(parse_hosts(bad)) << bad;
}

TEST(TopologyFile, WhatIsWrongIsNamed) {
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("hosts: [{name: a, link: x}]"); }),
              "hosts[0].link: names 'x'");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("hosts: [{name: a, switch: x}]"); }),
              "hosts[0].switch: names 'x'");
  EXPECT_SAYS(refused<ConfigFileError>(
                  [] { yaml("hosts: [{name: a}]\nswitches: [{name: s, parent: t}]"); }),
              "names 't'");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("hosts: [{name: a, devises: 2}]"); }),
              "devises: is not a field");
  EXPECT_SAYS(refused<ConfigFileError>(
                  [] { yaml("hosts: [{name: a, links: [{between: [0], class: host}]}]"); }),
              "two device numbers");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("hosts: 1x1\nnetwork: {bandwidth: 5 parsec}"); }),
              "unknown unit 'parsec'");
  EXPECT_SAYS(refused<ConfigFileError>([] { yaml("hosts: 1x1\nnetwork: {bandwidth: fast}"); }),
              "finite number");
  EXPECT_SAYS(
      refused<ConfigFileError>([] { yaml("hosts: 1x1\ndevice_links: [{name: a}, {name: a}]"); }),
      "listed twice");
  EXPECT_SAYS(refused<MappingError>([] { yaml("hosts: 1x1\nnetwork: {bandwidth: 0}"); }),
              "bandwidth of 0");
  EXPECT_SAYS(refused<MappingError>([] { yaml("hosts: [{name: a, devices: -3}]"); }), "-3 devices");
  EXPECT_SAYS(refused<MappingError>([] { yaml("network: {latency: 1us}"); }), "without hosts");
}

TEST(SlurmTopology, Tree) {
  Topology hosts = parse_hosts("4,2,4");
  hosts.hosts[0].name = "tux1";
  hosts.hosts[1].name = "tux12";
  hosts.hosts[2].name = "tux3";
  const std::string conf =
      "# fabric\n"
      "SwitchName=s0 Nodes=tux[0-5]\n"
      "switchname=s1 nodes=tux[6-11] LinkSpeed=100\n"
      "SwitchName=s2 \\\n  Nodes=tux[12-17]\n"
      "SwitchName=top Switches=s[0-2]\n"
      "SwitchName=other Nodes=x1\n";
  const auto topology = with_slurm_switches(hosts, conf, 2e-6, 5e9);
  ASSERT_EQ(topology.switches.size(), 3u);  // s1 and other lead to none of the hosts
  EXPECT_EQ(topology.switches[0], (Switch{"top", -1, 0, 0}));
  EXPECT_EQ(topology.switches[1], (Switch{"s0", 0, 2e-6, 5e9}));
  EXPECT_EQ(topology.switches[2].name, "s2");
  EXPECT_EQ(topology.hosts[0].network, 1);
  EXPECT_EQ(topology.hosts[1].network, 2);
  EXPECT_EQ(topology.hosts[2].network, 1);
  // All hosts below one leaf: nothing above it is kept.
  Topology two = hosts;
  two.hosts.erase(two.hosts.begin() + 1);
  EXPECT_EQ(with_slurm_switches(two, conf).switches.size(), 1u);
}

TEST(SlurmTopology, BadLines) {
  const Topology hosts = parse_hosts("1,1");
  const auto says = [&](const std::string& conf) {
    return refused<ConfigFileError>([&] { with_slurm_switches(hosts, conf); });
  };
  EXPECT_SAYS(says("SwitchName=a Nodes=host0"), "host 'host1' is connected to no switch");
  EXPECT_SAYS(says("SwitchName=a Nodes=host0\nSwitchName=b Nodes=host[0-1]"),
              "topology.conf:2: node 'host0' is connected to both 'a' and 'b'");
  EXPECT_SAYS(says("SwitchName=a Nodes=host0\nSwitchName=b Nodes=host1"), "no switch connects");
  EXPECT_SAYS(says("SwitchName=a Switches=b"), "switch 'b' is not defined");
  EXPECT_SAYS(says("SwitchName=a Nodes=host0\nSwitchName=a Nodes=host1"), "defined twice");
  EXPECT_SAYS(says("SwitchName=a"), "neither Switches nor Nodes");
  EXPECT_SAYS(says("Nodes=host0"), "SwitchName is missing");
  EXPECT_SAYS(says("\nSwitchName=a Nodes=host[0-"), "topology.conf:2:");
  EXPECT_SAYS(says("BlockName=a Nodes=host0"), "'BlockName' is unknown");
  EXPECT_SAYS(says("SwitchName=a Nodes"), "not Key=value");
  EXPECT_SAYS(says("Block\x1b[2J=a"), "'Block\\x1b[2J' is unknown");
  EXPECT_LT(says(std::string(100000, 'x') + "=a").size(), 500U);
  EXPECT_SAYS(says("SwitchName=a\x1b[2J Nodes=host0"), "SwitchName 'a\\x1b[2J' holds a blank");
  EXPECT_SAYS(says("SwitchName=a Switches=b Nodes=host[0-1]\nSwitchName=b Switches=a"),
              "its own ancestor");
}

TEST(LaunchTopology, AsTheLauncherSays) {
  Launch launch;
  launch.world_size = 5;
  launch.hosts = {"a", "b"};
  launch.ranks_per_host = {3, 2};
  const auto topology = topology_of(launch);
  EXPECT_EQ(topology.hosts[1].name, "b");
  EXPECT_EQ(topology.hosts[0].devices, 3);
  Launch single;
  EXPECT_EQ(topology_of(single).slots(), 1);
  Launch unknown;
  unknown.world_size = 8;
  unknown.local_size = 4;
  EXPECT_SAYS(refused<ConfigurationError>([&] { topology_of(unknown); }),
              "does not say how many of its 8 ranks");
  launch.hosts = {"a"};
  EXPECT_SAYS(refused<ConfigurationError>([&] { topology_of(launch); }),
              "1 host [a], but ranks for 2");
}

MeshTraffic drawn_traffic(std::mt19937& random) {
  MeshTraffic step;
  step.axes = random_axes(random, 4, 6, 96);
  if (step.axes.empty()) step.axes = {{"alone", 1}};
  for (int n = pick(random, 0, 5); n > 0; --n) {
    Traffic t{{},
              static_cast<Collective>(random() % 7),
              1e9 * pick(random, 0, 3) / 7.0,
              pick(random, 0, 9) / 3.0};
    for (const Axis& axis : step.axes)
      if (random() % 2) t.axes.push_back(axis.name);
    if (t.axes.empty()) t.axes.push_back(step.axes.back().name);
    step.traffic.push_back(std::move(t));
  }
  return step;
}

class TrafficFiles : public ::testing::Test {
 protected:
  TrafficFiles() { std::filesystem::create_directories(folder_); }
  ~TrafficFiles() override { std::filesystem::remove_all(folder_); }
  std::string says(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return refused<ConfigFileError>([&] { read_traffic(folder_ / name); });
  }
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / concat("traffic-", ::getpid());
};

TEST_F(TrafficFiles, AreReadAsTheyAreWritten) {
  std::mt19937 random(11);
  for (int n = 0; n < 200; ++n) {
    const MeshTraffic step = drawn_traffic(random);
    for (const std::string name : {"step.json", "step.yaml", "step.yml"}) {
      write_traffic(step, folder_ / name);
      ASSERT_EQ(read_traffic(folder_ / name), step) << name;
    }
    for (const FileFormat format : {FileFormat::json, FileFormat::yaml})
      ASSERT_EQ(parse_traffic(format_traffic(step, format), format), step);
  }
}

TEST_F(TrafficFiles, ThatHoldSomethingElseAreRefused) {
  const auto entry = [&](const std::string& fields) {
    return says("step.yaml", "mesh: {data: 2}\ntraffic:\n  - {" + fields + "}\n");
  };
  const std::string fine = "axes: [data], collective: all_reduce, ";
  for (const std::string number : {"-1", ".inf", ".nan", "-.inf", "x", "[1]", "true"}) {
    EXPECT_SAYS(entry(fine + "bytes: " + number), "step.yaml");
    EXPECT_SAYS(entry(fine + "bytes: 1, calls: " + number), "step.yaml");
  }
  EXPECT_SAYS(entry(fine + "bytes: 1e200, calls: 1e200"), "finite");
  EXPECT_SAYS(entry(fine + "bytes: 1e999"), "step.yaml");
  EXPECT_SAYS(entry(fine + "calls: 1"), "bytes: is missing");
  EXPECT_SAYS(entry("axes: [], collective: send, bytes: 1"), "names no axis");
  EXPECT_SAYS(entry("collective: send, bytes: 1"), "names no axis");
  EXPECT_SAYS(entry("axes: [model], collective: send, bytes: 1"), "the axis 'model'");
  EXPECT_SAYS(entry("axes: [data, data], collective: send, bytes: 1"), "'data' twice");
  EXPECT_SAYS(entry("axes: [data], collective: gossip, bytes: 1"), "no collective 'gossip'");
  EXPECT_SAYS(entry(fine + "bytes: 1, size: 2"), "size: is not a field");
  EXPECT_SAYS(says("step.json", R"({"mesh": {"data": 2}})"), "traffic: must be a list");
  EXPECT_SAYS(says("step.json", R"({"traffic": []})"), "mesh: is missing");
  EXPECT_SAYS(says("step.json", R"({"mesh": {"data": 0}, "traffic": []})"), "whole number from 1");
  EXPECT_SAYS(says("step.json", R"({"mesh": {"a": 4000000, "b": 2}, "traffic": []})"), "at most");
  EXPECT_SAYS(says("step.json", R"({"mesh": [2], "traffic": []})"), "must be an object");
  EXPECT_SAYS(says("step.json", "{\"mesh\": {\"\xff\": 2}, \"traffic\": []}"), "step.json");
  EXPECT_SAYS(says("step.yaml", "mesh: {\xff: 2}\ntraffic: []\n"), "step.yaml");
  EXPECT_SAYS(says("step.txt", "mesh"), "must end in .json");
  EXPECT_SAYS(refused<ConfigFileError>([&] { read_traffic(folder_ / "absent.json"); }), "absent");
}

TEST_F(TrafficFiles, NumbersThatAreNoneAreNotWritten) {
  const double infinite = std::numeric_limits<double>::infinity();
  for (const Traffic& wrong : std::vector<Traffic>{{{"data"}, Collective::send, -1, 1},
                                                   {{"data"}, Collective::send, 1, infinite},
                                                   {{"data"}, Collective::send, std::nan(""), 1},
                                                   {{"data"}, Collective::send, 1e200, 1e200},
                                                   {{}, Collective::send, 1, 1}}) {
    const MeshTraffic step{{{"data", 2}}, {wrong}};
    refused<GroupConfigError>([&] { write_traffic(step, folder_ / "step.json"); });
    EXPECT_FALSE(std::filesystem::exists(folder_ / "step.json"));
    refused<GroupConfigError>(
        [&] { CostModel(Topology::of_counts({2}), step.axes, step.traffic); });
  }
  EXPECT_SAYS(refused<ConfigFileError>([&] { write_traffic({}, folder_ / "no" / "step.json"); }),
              "cannot be written");
}

TEST(Topology, OfABatchScriptIsItsAllocation) {
  // sbatch -N2 -n3, as Slurm 22.05 sets it.
  const Environment script{{{"SLURM_JOB_ID", "7"},
                            {"SLURM_NTASKS", "3"},
                            {"SLURM_PROCID", "0"},
                            {"SLURM_LOCALID", "0"},
                            {"SLURM_NODEID", "0"},
                            {"SLURM_NNODES", "2"},
                            {"SLURM_JOB_NODELIST", "node[08-09]"},
                            {"SLURM_TASKS_PER_NODE", "2,1"}},
                           "node08"};
  const auto topology = topology_of(script);
  ASSERT_EQ(topology.hosts.size(), 2u);
  EXPECT_EQ(topology.hosts[0].name, "node08");
  EXPECT_EQ(topology.hosts[0].devices, 2);
  EXPECT_EQ(topology.hosts[1].devices, 1);
  // A step inside it is what it is.
  Environment step = script;
  step.variables["SLURM_STEP_NODELIST"] = "node09";
  step.variables["SLURM_STEP_TASKS_PER_NODE"] = "3";
  EXPECT_EQ(topology_of(step).hosts.front().name, "node09");
  Environment strange = script;
  strange.variables["SLURM_TASKS_PER_NODE"] = "2,1,1";
  EXPECT_THROW(topology_of(strange), ConfigurationError);
}

TEST(RankFile, RoundTrips) {
  std::mt19937 random(41);
  for (int n = 0; n < 300; ++n) {
    std::vector<int> devices;
    for (int h = pick(random, 1, 5); h > 0; --h) devices.push_back(pick(random, 1, 5));
    const auto topology = Topology::of_counts(devices);
    std::vector<int> slots(topology.slots());
    std::iota(slots.begin(), slots.end(), 0);
    shuffle(slots, random);
    slots.resize(pick(random, 1, static_cast<int>(slots.size())));
    ASSERT_EQ(parse_rank_file(open_mpi_rank_file(topology, slots), topology), slots);
    const auto hosts = parse_rank_file(slurm_host_file(topology, slots), topology);
    ASSERT_EQ(hosts.size(), slots.size());
    for (std::size_t r = 0; r < slots.size(); ++r)
      ASSERT_EQ(topology.host_of(hosts[r]), topology.host_of(slots[r]));
    ASSERT_TRUE(keeps_device_order(topology, hosts));
    std::ranges::sort(slots);
    ASSERT_TRUE(keeps_device_order(topology, slots));
  }
  const auto topology = parse_hosts("2x2");
  EXPECT_FALSE(keeps_device_order(topology, {1, 0}));
  EXPECT_EQ(open_mpi_rank_file(topology, {3, 0}), "rank 0=host1 slot=1\nrank 1=host0 slot=0\n");
  EXPECT_EQ(slurm_host_file(topology, {3, 0}), "host1\nhost0\n");
}

TEST(RankFile, BadLines) {
  const auto topology = parse_hosts("2x2");
  const auto says = [&](const std::string& text) {
    return refused<ConfigFileError>([&] { parse_rank_file(text, topology); });
  };
  EXPECT_SAYS(says("rank 0=host9 slot=0"), "'host9' is not in the topology");
  EXPECT_SAYS(says("rank 0=host0 slot=2"), "slot 2 of host 'host0', which has 2");
  EXPECT_SAYS(says("rank 0=host0 slot=0\nrank 0=host0 slot=1"), "rank 0 is duplicated");
  EXPECT_SAYS(says("rank 1=host0 slot=0"), "rank 0 is missing");
  EXPECT_SAYS(says("host0\nrank 1=host0 slot=1"), "two forms are mixed");
  EXPECT_SAYS(says("host0\nhost0\nhost0"), "rank file:3: host 'host0' is named more often");
  EXPECT_SAYS(says("rank zero"), "neither");
}

TEST(Hwloc, XmlOfAMachine) {
  const std::string folder = TESSERA_TEST_DATA;
  // Two packages with two GPUs and one InfiniBand adapter each.
  const auto topology = read_hwloc_topology(folder + "/two_packages.xml", HostDevice::gpu, "n0");
  ASSERT_EQ(topology.hosts[0].devices, 4);
  EXPECT_EQ(topology.hosts[0].links, (std::vector<DeviceLink>{{0, 1, 1}, {2, 3, 1}}));
  EXPECT_EQ(topology.hosts[0].rail, (std::vector<int>{0, 0, 1, 1}));
  const auto packages =
      read_hwloc_topology(folder + "/two_packages.xml", HostDevice::package, "n0");
  EXPECT_EQ(packages.hosts[0].devices, 2);
  EXPECT_TRUE(packages.hosts[0].links.empty());
  const auto cores = read_hwloc_topology(folder + "/two_packages.xml", HostDevice::core, "n0");
  EXPECT_EQ(cores.hosts[0].devices, 4);
  EXPECT_EQ(cores.hosts[0].links.size(), 2u);
  const auto two = replicate_host(topology, {"a", "b"});
  EXPECT_EQ(two.slots(), 8);
  EXPECT_EQ(two.hosts[1].rail, topology.hosts[0].rail);
  EXPECT_SAYS(refused<MappingError>([&] { replicate_host(two, {"c"}); }), "it has 2");
  EXPECT_SAYS(
      refused<ConfigFileError>([] { parse_hwloc_topology("<topology", HostDevice::gpu, "n0"); }),
      "hwloc XML");
  EXPECT_SAYS(refused<ConfigFileError>([] { host_device_from("tpu"); }), "'tpu'");
}

TEST(Hwloc, ThisMachine) {
  const auto topology = live_hwloc_topology(HostDevice::core, "me");
  EXPECT_GE(topology.slots(), 1);
  EXPECT_EQ(topology.hosts[0].name, "me");
}
